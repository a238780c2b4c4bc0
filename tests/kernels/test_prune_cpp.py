"""The C++ kernels that prune: bit for bit what the PyTorch rules give, and when they run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fst
from fst import NM, Strategy, backends
from fst.backends import sources
from fst.backends.choice import compute
from fst.ops import cpp
from fst.ops.backends import prune_cpp
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import prune_columns, prune_grad_output
from fst.rules.rule import Pattern
from tests.kernels.values import awkward, bits, of_patterns

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last")
CHECKS = ("test_schema", "test_faketensor")
COMPILED = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


def _with_torch(function, *arguments):
    operations = ("prune_weight", "prune_grad_output", "prune_columns")
    with fst.backends.force(**dict.fromkeys(operations, "torch")):
        return function(*arguments)


def _assert_same_weights(weight: Tensor, strategy: Strategy, groups: int, dtype: torch.dtype):
    with fst.backends.force(prune_weight="cpp"):
        pruned = compute(operands := PruneWeight(weight, strategy, groups, dtype))
    expected = _with_torch(compute, operands)
    assert torch.equal(bits(pruned.output), bits(expected.output))
    assert torch.equal(bits(pruned.grad_input), bits(expected.grad_input))
    assert (pruned.mask is None) == (expected.mask is None)
    if pruned.mask is not None:
        assert torch.equal(pruned.mask, expected.mask)
        assert pruned.mask.stride() == weight.stride()


def _assert_same_gradient(values: Tensor, n: int, m: int, groups: int) -> None:
    rule = NM("grad_output", n, m)
    with fst.backends.force(prune_grad_output="cpp"):
        pruned = prune_grad_output(values, rule, "grad_input", groups, None)
    expected = _with_torch(prune_grad_output, values, rule, "grad_input", groups, None)
    assert torch.equal(bits(pruned), bits(expected))
    assert pruned.stride() == values.stride()


@pytest.mark.each_isa
@COMPILED
@pytest.mark.parametrize("memory", LAYOUTS)
@pytest.mark.parametrize(
    ("output", "grad_input"),
    [
        *(((2, 4), (2, 4)), ((1, 4), (3, 4)), ((3, 8), (2, 8)), ((3, 5), (2, 16))),
        *(((1, 2), None), (None, (2, 4))),
    ],
)
def test_weights_bit_for_bit(output, grad_input, memory):
    pairs = [(kind, kind) for kind in DTYPES] + [(torch.float32, kind) for kind in DTYPES[1:]]
    shapes = [((8, 16, 3, 3), 1), ((6, 3, 7, 7), 1), ((12, 8, 1, 1), 2), ((65, 33, 5, 5), 5)]
    shapes += [((8, 110, 1, 1), 2), ((6, 13, 3, 3), 3), ((3, 139, 3, 3), 1), ((9, 64, 3, 3), 1)]
    for shape, groups in shapes:
        for stored, result in pairs:
            weight = awkward(shape, stored, memory)
            _assert_same_weights(weight, of_patterns(output, grad_input), groups, result)


@pytest.mark.each_isa
@COMPILED
@pytest.mark.parametrize("memory", LAYOUTS)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (3, 5), (4, 8), (4, 4), (4, 32)])
def test_gradients_bit_for_bit(n, m, memory):
    shapes = (((2, 16, 3, 5), 1), ((1, 18, 2, 4), 2), ((1, 70, 40, 1), 1), ((3, 128, 7, 7), 4))
    for shape, groups in shapes:
        for dtype in DTYPES:
            _assert_same_gradient(awkward(shape, dtype, memory), n, m, groups)


@COMPILED
@pytest.mark.parametrize("memory", LAYOUTS)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (3, 5), (4, 8), (4, 4), (4, 32)])
def test_groups_along_positions_bit_for_bit(n, m, memory):
    """Of grad_output in grad_weight, and of the columns of the input."""
    of_gradient, of_input = NM("grad_output", n, m), NM("input", n, m)
    for shape in ((2, 16, 3, 5), (1, 18, 2, 4), (3, 5, 1, 1), (3, 33, 7, 7)):
        for dtype in DTYPES:
            values = awkward(shape, dtype, memory)
            columns = values.flatten(2)
            for operation, prune in {
                "prune_grad_output": lambda v=values: prune_grad_output(
                    v, of_gradient, "grad_weight", 1, None
                ),
                "prune_columns": lambda c=columns: prune_columns(c, of_input, None),
            }.items():
                with fst.backends.force(**{operation: "cpp"}):
                    pruned = prune()
                with fst.backends.force(**{operation: "torch"}):
                    expected = prune()
                assert torch.equal(bits(pruned), bits(expected))
                assert pruned.shape == expected.shape


@pytest.mark.each_isa
@COMPILED
@given(
    st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=200),
    st.integers(1, 3),
    st.sampled_from([(2, 4), (1, 2), (5, 8), (2, 3)]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_any_bits(numbers, rows, pattern, dtype, last):
    """Every bit pattern of 16 bits, as float32 the upper half: subnormal, infinite, NaN."""
    raw = torch.tensor(numbers * rows).to(torch.int16)
    values = (raw.int() << 16).view(dtype) if dtype == torch.float32 else raw.view(dtype)
    values = values.view(1, -1, rows, 1)
    format = torch.channels_last if last else torch.contiguous_format
    _assert_same_gradient(values.contiguous(memory_format=format), *pattern, 1)


@COMPILED
@pytest.mark.parametrize("rescale", ["sample_channel", "group"])
@pytest.mark.parametrize("memory", LAYOUTS)
def test_rescaled_is_as_exact_as_the_operators(memory, rescale):
    """At most twice their error, both against float64; the same bits by any number of threads."""
    format = torch.channels_last if memory == "channels_last" else torch.contiguous_format
    for (n, m), dtype in (((2, 4), torch.bfloat16), ((4, 32), torch.float32), ((3, 5), torch.half)):
        values = torch.randn(3, 160, 19, 23).to(dtype).contiguous(memory_format=format)
        rule = NM("grad_output", n, m, "magnitude_rescaled", rescale)
        arguments = (rule, "grad_input", 2, None)
        exact = _with_torch(prune_grad_output, values.double(), *arguments)
        same = _with_torch(prune_grad_output, values, *arguments)
        pruned = prune_grad_output(values, *arguments)
        allowed = 2 * (same.double() - exact).abs().max() + 1e-6
        assert (pruned.double() - exact).abs().max() <= allowed
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        again = prune_grad_output(values, *arguments)
        torch.set_num_threads(threads)
        assert torch.equal(bits(pruned), bits(again))
    zeros = torch.zeros(1, 8, 2, 2)
    assert torch.equal(prune_grad_output(zeros, *arguments), zeros)


def _philox(seed: int, place: int, run: int) -> list[int]:
    """The four words of Philox4x32-10 (Salmon et al. 2011) for the counter (place, run, 0, 0)."""
    a, b, c, d = place, run, 0, 0
    keys = [seed % 2**32, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (second >> 32) ^ b ^ keys[0], second % 2**32
        c, d = (first >> 32) ^ d ^ keys[1], first % 2**32
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return [a, b, c, d]


def _drawn(seed: int, shape: tuple[int, ...], n: int, m: int) -> Tensor:
    """Selection sampling as the Triton kernel does it, place by place."""
    samples, channels, height, width = shape
    kept = torch.zeros(samples * height * width, channels, dtype=torch.bool)
    span = 8 if m in (2, 4, 8) else m
    for place in range(len(kept)):
        for start in range(0, channels, m):
            words = _philox(seed, place, start // span)
            first = start % span // m * ((m + 3) // 4)
            left = min(m, channels - start)
            wanted, fraction = min(n, left), 0
            for i in range(left):
                if i % 4 == 0:
                    fraction = words[first + i // 4]
                digit, fraction = divmod(fraction * (left - i), 2**32)
                kept[place, start + i] = digit < wanted
                wanted -= digit < wanted
    return kept.view(samples, height, width, channels).permute(0, 3, 1, 2)


@COMPILED
@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 5), (1, 8)])
def test_random_draws_are_those_of_the_triton_kernel(n, m):
    seed = 2**40 + 2026
    for shape in ((2, 16, 3, 5), (1, 19, 1, 70)):
        expected = _drawn(seed, shape, n, m)
        for memory in LAYOUTS:
            ones = awkward(shape, torch.float32, memory).fill_(1)
            draw = torch.tensor([seed])
            pruned = prune_cpp.prune_grad_output(ones, n, m, "random", "", 1, draw)
            assert torch.equal(pruned != 0, expected)


@COMPILED
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_numbers_reach_no_kernel(kind):
    if kind == "fake":
        with FakeTensorMode():
            weight = torch.randn(8, 8, 3, 3)
    else:
        weight = torch.randn(8, 8, 3, 3, device="meta")
    found = prune_cpp.prune_weight(weight, 1, (2, 4, 2, 4), torch.float32)
    assert [type(f) for f in found] == [type(weight)] * 3 and found[0].shape == weight.shape
    assert {f.device for f in found} == {weight.device}


def test_wrong_arguments_are_named():
    values = awkward((2, 8, 3, 4), torch.float32, "channels_last")
    for wrong, reason in (
        ((values.double(), 2, 4, "magnitude", "", 1, None), "float64"),
        ((values[:, ::2], 2, 4, "magnitude", "", 1, None), "strides"),
        ((values, 2, 33, "magnitude", "", 1, None), "m=33"),
        ((values, 2, 9, "random", "", 1, torch.tensor([1])), "m=9"),
        ((values, 2, 4, "magnitude", "", 3, None), "groups=3 must divide 8"),
        ((values, 2, 4, "random", "", 1, None), "needs seed="),
    ):
        with pytest.raises((TypeError, ValueError), match=reason):
            torch.ops.fst.prune_grad_output_cpp(*wrong)


def _gradients(strategy: str, compiled: bool = False) -> tuple[torch.nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 16, 3, groups=2), torch.nn.ReLU())
    model = torch.nn.Sequential(*layers)
    fst.convert(model, strategy)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run(torch.randn(2, 3, 9, 9)).square().sum().backward()
    return model, [parameter.grad for parameter in model.parameters()]


@COMPILED
@pytest.mark.parametrize(
    "strategy",
    ["fst", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("sdgp", "gx"))],
)
def test_layers_use_them_by_default_and_say_so(strategy):
    """Eager and compiled, with the gradients that the operators give."""
    model, gradients = _gradients(strategy)
    operations = {"sdgp": ["prune_grad_output"], "gx": ["prune_grad_output", "prune_columns"]}
    for operation in operations.get(strategy, ["prune_weight"]):
        assert model[1].state.record.decisions[operation].backend == "cpp"
    assert "cpp" in fst.api.report.backends_table(model)
    _, expected = _with_torch(_gradients, strategy)
    _, compiled = _gradients(strategy, compiled=True)
    for found, same, wanted in zip(gradients, compiled, expected, strict=True):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(same, wanted)


@COMPILED
def test_random_rules_and_what_does_not_fit_stay_with_torch():
    values = torch.randn(2, 16, 4, 4)
    rule, generator = NM("grad_output", 2, 4, "random"), torch.Generator()
    arguments = (values, rule, "grad_input", 1)
    found = prune_grad_output(*arguments, generator.manual_seed(1))
    expected = _with_torch(prune_grad_output, *arguments, generator.manual_seed(1))
    assert torch.equal(found, expected)
    for other, m, rescale in (
        (values.double(), 4, "group"),
        (values, 33, "group"),
        (values, 4, "channel"),
        (values.transpose(2, 3)[:, ::2], 4, "group"),
    ):
        assert _refuses_maps(other, m, "magnitude_rescaled", rescale)
    assert _refuses_maps(values, 16, "random", "group") == "groups of 16 are more than 8"
    backend, strategy = backends.backend("prune_weight", "cpp"), of_patterns((2, 4), None)
    for weight, dtype in (
        (torch.randn(4, 4, 3, 3).double(), torch.float64),
        (torch.randn(4, 4, 3, 3, dtype=torch.half), torch.bfloat16),
    ):
        assert backend.refuses(PruneWeight(weight, strategy, 1, dtype))


def _refuses_maps(values: Tensor, m: int, kind: str, rescale: str) -> str:
    rule, pattern = NM("grad_output"), Pattern(2, m, kind, rescale)
    operands = PruneMaps(values, rule, "grad_input", 1, None, None, pattern)
    return backends.backend("prune_grad_output", "cpp").refuses(operands)


def test_missing_kernels_are_not_used_and_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "cpp_library", lambda: tmp_path / "cpu_base.so")
    cpp._load.cache_clear()
    try:
        assert "then install FST again (in a clone: pip install -e .)" in cpp.missing()
        model, _ = _gradients("fst")
        assert model[1].state.record.decisions["prune_weight"].backend == "torch"
        with pytest.raises(RuntimeError, match="cannot be forced here: not compiled"):
            backends.force(prune_weight="cpp").__enter__()
        assert "not compiled: install GCC or Clang" in backends.describe()
        cpp._load.cache_clear()
        (tmp_path / "cpu_base.so").write_bytes(b"half a library")
        assert "cannot be loaded" in cpp.missing()
    finally:
        cpp._load.cache_clear()
