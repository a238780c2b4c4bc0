"""The whole op by the backends that leave out zeros, against the float64 reference."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import fst
from fst.backends import Record, choice, registry
from fst.ops import cpp
from fst.ops.geometry import Geometry, gradients
from fst.ops.operands import GradWeight, Zeros
from tests.cases import CASES, Case, Operands, case, error, leaves_of, run, without_onednn
from tests.oracle.conv import reference_conv2d, reference_linear
from tests.strategy_settings import setting

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GEMMS = ("output", "grad_input", "grad_weight")
DENSE = dict.fromkeys(GEMMS, "dense")
BACKENDS = (  # each of an operation once
    {"output": "zeros_weight", "grad_input": "zeros_weight", "grad_weight": "zeros_input"},
    {"output": "zeros_input", "grad_input": "zeros_grad_output"},
    {"grad_weight": "zeros_grad_output"},
)
PAIRS = [(gemm, name) for names in BACKENDS for gemm, name in names.items()]
EVERYWHERE = ("srste", "sparsetrain")  # S(W), S(Wᵀ), and dense operands
ELSEWHERE = ("fst", "fst_w", "sdgp", "wg", "tsm", "mvue", "sampled")
HARD = ("odd_nhwc", "grouped_stride2", "mixed", "wide_channels")
SETTINGS = [(name, c) for name in EVERYWHERE for c in CASES]
SETTINGS += [(name, case(id)) for name in ELSEWHERE for id in HARD]
PLAIN = Case("plain", (8, 8), (6, 6), padding=1, batch=2)


def operands_of(the_case: Case, dtype: torch.dtype = torch.float32) -> Operands:
    """Half of the numbers of both maps are zero."""
    found = the_case.operands(dtype)
    torch.manual_seed(0)
    found.input = found.input.relu()
    found.grad_output = found.grad_output * (torch.rand(found.grad_output.shape) < 0.5)
    return found


def computed(the_case: Case, operands: Operands, strategy, names: dict[str, str]):
    """Results of the op, and by which backend each product was computed."""
    record = Record()
    plain = without_onednn(operands.weight.itemsize == 2)
    with choice.recording(record), fst.backends.prefer(**names), plain:
        found = run(the_case, operands, strategy)
    return found, {gemm: record.decisions[gemm].backend for gemm in GEMMS}


def takes(gemm: str, name: str, the_case: Case, strategy: fst.Strategy) -> bool:
    """True unless the backend must refuse: few channels, and rules that leave positions out."""
    least = min(the_case.channels) // the_case.groups
    if name == "zeros_weight":
        return the_case.groups == 1 or least >= 4
    rule = strategy.grad_weight if gemm == "grad_weight" else None
    positions = rule is not None and rule.operand == "input"
    rows, columns = the_case.output_size
    if positions:
        kept, total = rule.kept(gemm, (1, 1, 1, 1), 1, rows, columns)
        positions = kept < total
    return least >= 4 and not positions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "the_case"), SETTINGS)
def test_products_are_as_exact_as_torchs(name, the_case, dtype):
    """An error of at most twice torch's, and one rounding of the result."""
    row = setting(name)
    strategy, operands = row.build(), operands_of(the_case, dtype)
    of_lists = fst.get_strategy("dense")  # whoever takes all positions is exact
    exact = None
    if not row.drawn:
        exact = reference_conv2d(
            *(operands.input, operands.weight, operands.grad_output),
            bias=operands.bias,
            **the_case.arguments,
            strategy=of_lists if name == "sampled" else strategy,
            draws={"phase": 0},
        )
    for last in (False, True):
        memory = torch.channels_last if last else torch.contiguous_format
        laid_out = {
            n: getattr(operands, n).contiguous(memory_format=memory)
            for n in ("input", "weight", "grad_output")
        }
        given = replace(operands, **laid_out)
        same, _ = computed(the_case, given, strategy, DENSE)
        for names in BACKENDS:
            found, ran = computed(the_case, given, strategy, names)
            for index, gemm in enumerate(GEMMS):
                if gemm not in names:
                    continue
                wanted = takes(gemm, names[gemm], the_case, strategy)
                assert (ran[gemm] == names[gemm]) == wanted, ran
                if not wanted:
                    continue
                assert found[index].dtype == same[index].dtype
                eps = torch.finfo(dtype).eps
                if exact is None:
                    assert error(found[index], same[index]) <= 3 * eps
                else:
                    torchs = error(same[index], exact[index])
                    assert error(found[index], exact[index]) <= 2 * torchs + eps


@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
@pytest.mark.parametrize(
    ("kernel", "dilation", "groups"),
    [((2, 2), 1, 1), ((4, 3), 1, 2), ((3, 2), (2, 3), 1), ((1, 4), 1, 1)],
)
def test_layers_with_asymmetric_padding(kernel, dilation, groups, name):
    shape = dict(kernel=kernel, dilation=dilation, groups=groups, padding="same", bias=True)
    the_case = Case("same", (8, 12), (7, 9), **shape)
    operands = operands_of(the_case)
    # a layer's decay waits for the optimizer's step
    strategy = fst.get_strategy(name, **({"decay": 0.0} if name == "srste" else {}))
    exact = reference_conv2d(
        *(operands.input, operands.weight, operands.grad_output),
        bias=operands.bias,
        **the_case.arguments,
        strategy=strategy,
    )
    for names in BACKENDS:
        layer = nn.Conv2d(8, 12, kernel, padding="same", dilation=dilation, groups=groups)
        net = nn.Sequential(layer)
        fst.convert(net, strategy)
        layer.weight.data.copy_(operands.weight)
        layer.bias.data.copy_(operands.bias)
        input = operands.input.clone().requires_grad_()
        with fst.backends.force(**names):
            output = net(input)
            output.backward(operands.grad_output)
        found = (output, input.grad, layer.weight.grad, layer.bias.grad)
        for mine, other in zip(found, exact, strict=True):
            assert error(mine.detach(), other) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 12), (3, 7, 12), (2, 3, 4, 12), (7, 9)], ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_linear_layers(name, shape, dtype):
    strategy = fst.get_strategy(name)
    input = torch.randn(shape).relu().to(dtype)
    weight, bias = torch.randn(10, shape[-1]).to(dtype), torch.randn(10).to(dtype)
    grad_output = (torch.randn(*shape[:-1], 10) * (torch.rand(*shape[:-1], 10) < 0.5)).to(dtype)
    exact = reference_linear(input, weight, grad_output, bias=bias, strategy=strategy)
    for names in BACKENDS:
        leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
        with fst.backends.force(**names):
            output = fst.sparse_linear(*leaves, strategy=strategy)
            output.backward(grad_output)
        for mine, other in zip((output, *(x.grad for x in leaves)), exact, strict=True):
            assert error(mine.detach(), other) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("fill", [0.0, -0.0, 1.0])
@pytest.mark.parametrize("names", BACKENDS, ids=str)
def test_operands_of_zeros_alone_and_without_any(names, fill):
    operands = PLAIN.operands(torch.float32)
    if fill:
        tensors = (operands.input, operands.weight, operands.grad_output)
        assert all((t != 0).all() for t in tensors)
        found, ran = computed(PLAIN, operands, "sparsetrain", names)
        exact = reference_conv2d(*tensors, strategy=fst.get_strategy("dense"), **PLAIN.arguments)
        assert all(error(a, e) <= 1e-6 for a, e in zip(found[:3], exact[:3], strict=True))
        return
    for changed in ("input", "weight", "grad_output"):
        zero = torch.full_like(getattr(operands, changed), fill)
        given = replace(operands, **{changed: zero})
        found, ran = computed(PLAIN, given, "sparsetrain", names)
        dense, _ = computed(PLAIN, given, "sparsetrain", DENSE)
        assert names.items() <= ran.items()
        for mine, other in zip(found[:3], dense[:3], strict=True):
            assert bool(mine.any()) == bool(other.any())
            assert error(mine, other) <= 1e-6


def test_a_bias_that_is_not_contiguous():
    bias = torch.ones(1).expand(8)
    operands = operands_of(PLAIN)
    expected = F.conv2d(operands.input, operands.weight, bias, padding=1)
    for name in ("zeros_weight", "zeros_input"):
        with fst.backends.force(output=name):
            found = fst.sparse_conv2d(
                operands.input, operands.weight, bias, padding=1, strategy="sparsetrain"
            )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("names", BACKENDS, ids=str)
@pytest.mark.parametrize("name", ["srste", "sdgp", "sparsetrain", "sampled"])
def test_an_empty_batch(name, names):
    empty = replace(PLAIN, batch=0)
    found, _ = computed(empty, empty.operands(torch.float32), name, names)
    assert [tuple(t.shape) for t in found[:3]] == [(0, 8, 6, 6), (0, 8, 6, 6), (8, 8, 3, 3)]
    if name != "srste":  # whose decay is there without data
        assert not found[2].any()


@pytest.mark.parametrize("the_case", [c for c in CASES if c.id in HARD])
def test_gradients_are_those_of_the_output(the_case):
    """Y is linear in X and in W: ⟨dY, Y(V)⟩ = ⟨dX, V⟩ for any V."""
    operands = replace(operands_of(the_case), bias=None)
    torch.manual_seed(1)
    input = torch.randn_like(operands.input).relu()
    weight = torch.randn_like(operands.weight)
    for names in BACKENDS:
        names = {"output": "zeros_weight"} | names
        found = computed(the_case, operands, "sparsetrain", names)[0]
        for gradient, moved, changed in (
            (found[1], input, replace(operands, input=input)),
            (found[2], weight, replace(operands, weight=weight)),
        ):
            output = computed(the_case, changed, "sparsetrain", names)[0][0]
            left = (output.double() * operands.grad_output).sum()
            right = (gradient.double() * moved).sum()
            size = output.double().norm() * operands.grad_output.double().norm()
            assert abs(left - right) <= 1e-6 * size


# ---------------------------------------------------------------- what is not finite


def _counts(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The three products of these operands in float64, by torch."""
    wide = [t.double().requires_grad_() for t in (operands.input, operands.weight)]
    output = F.conv2d(*wide, padding=1)
    gradients = torch.autograd.grad(output, wide, operands.grad_output.double())
    return output.detach(), *gradients


OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("gemm", "name"), PAIRS)
def test_what_is_not_finite_reaches_all_that_a_nonzero_multiplies(gemm, name, value, dtype):
    """A zero of the operand whose zeros are left out adds nothing, whatever it is multiplied by."""
    skipped = name.removeprefix("zeros_")
    for changed in OPERANDS[gemm]:
        operands = operands_of(PLAIN, dtype)
        operands.weight[torch.rand(operands.weight.shape) < 0.5] = 0
        getattr(operands, changed).view(-1)[[5, 77]] = value
        found = computed(PLAIN, operands, "sparsetrain", {gemm: name})[0]
        counted = {n: torch.ones_like(getattr(operands, n)) for n in OPERANDS[gemm]}
        counted[skipped] = getattr(operands, skipped) != 0
        counted[changed] = counted[changed].logical_and(~getattr(operands, changed).isfinite())
        index = GEMMS.index(gemm)
        wanted = _counts(replace(operands, **counted))[index] > 0.5
        infinite = ~found[index].isfinite()
        if changed == skipped == "weight":  # beside the image it multiplies zeros too
            assert infinite[wanted].all()
            wanted = wanted.any((0, 2, 3), keepdim=True).expand_as(wanted) & infinite
        assert wanted.any() and torch.equal(infinite, wanted)


@pytest.mark.parametrize("names", BACKENDS, ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_a_gradient_scaler_finds_an_infinite_gradient(name, names):
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    fst.convert(net, name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    with fst.backends.force(**names):
        loss = net(torch.randn(2, 8, 8, 8)).square().sum()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


# ---------------------------------------------------------------- changes, threads, graphs


@pytest.mark.parametrize("names", [*BACKENDS, DENSE], ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_a_weight_that_changes_before_the_backward_pass(name, names):
    """Autograd sees a change in place; behind its back the result is that of the dense products."""
    operands, results = operands_of(PLAIN), []
    for hidden in (False, True):
        for chosen in (names, DENSE):
            input, weight, _ = leaves_of(operands)
            with fst.backends.force(**chosen):
                output = fst.sparse_conv2d(input, weight, padding=1, strategy=name)
                if hidden:
                    weight.data.neg_()
                    output.backward(operands.grad_output)
                    results.append((input.grad, weight.grad))
                    continue
                with torch.no_grad():
                    weight.neg_()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    output.backward(operands.grad_output)
    for mine, dense in zip(*results, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gemm", "backend"), PAIRS)
@pytest.mark.parametrize(
    "name",
    ["srste", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("fst", "sparsetrain"))],
)
def test_one_graph_under_torch_compile(name, gemm, backend, monkeypatch):
    monkeypatch.delenv("FST_AUTOTUNE")
    strategy = fst.get_strategy(name)
    if not takes(gemm, backend, PLAIN, strategy):
        pytest.skip("the rule leaves positions out, and the backend takes all")
    operands, called = operands_of(PLAIN), set()

    def function(input: Tensor, weight: Tensor) -> Tensor:
        return fst.sparse_conv2d(input, weight, padding=1, strategy=strategy)

    def noted(graph: torch.fx.GraphModule, _: object):
        called.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=noted))
    results = []
    with fst.backends.force(**{gemm: backend}):
        for call in (function, compiled):
            input, weight, _ = leaves_of(operands)
            output = call(input, weight)
            output.backward(operands.grad_output)
            results.append((output.detach(), input.grad, weight.grad))
    kind = "zeros" if backend == "zeros_weight" else "maps"
    assert f"fst.{kind}_{gemm}_cpp.default" in called
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_calls_from_many_threads():
    operands = [operands_of(Case("any", (8, 8), (6, 4 + i), padding=1)) for i in range(6)]
    cases = [Case("any", (8, 8), (6, 4 + i), padding=1) for i in range(6)]
    for names in BACKENDS:
        with fst.backends.force(**names):

            def step(i: int) -> tuple[Tensor, ...]:
                return run(cases[i % 6], operands[i % 6], "srste")[:3]

            wanted = [step(i) for i in range(6)]
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(step, range(24)))
        for i, results in enumerate(found):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted[i % 6], strict=True))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["zeros_input", "zeros_grad_output", "dense"])
def test_every_backend_of_grad_weight_is_timed_with_the_grad_input_that_is_wanted_too(name, joint):
    """The library computes both gradients in one call, and less time than one after the other."""
    input, weight = torch.randn(2, 8, 6, 6).relu(), torch.randn(8, 8, 3, 3)
    grad_output, geometry = torch.randn(2, 8, 6, 6).relu(), Geometry((1, 1), (1, 1), (1, 1), 1)
    zeros = Zeros(input=0.5, grad_output=0.5)
    operands = GradWeight(grad_output, weight, geometry, input, joint=joint, zeros=zeros)
    backend = registry.backend("grad_weight", name)
    grad_input, grad_weight, _ = backend.plan(operands)(operands)
    maps = grad_output, input, weight
    expected = gradients(*maps, geometry, (True, True, False))(*maps)
    torch.testing.assert_close(grad_weight, expected[1], rtol=1e-4, atol=1e-4)
    assert (grad_input is not None) == joint
    if joint:
        torch.testing.assert_close(grad_input, expected[0], rtol=1e-4, atol=1e-4)
        alone = replace(operands, joint=False)
        assert name == "dense" or backend.cost(alone) < backend.cost(operands)
