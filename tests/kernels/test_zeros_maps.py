"""The C++ kernels that leave out zeros of the maps, against the slow float64 reference."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fst.ops import cpp
from fst.ops.backends import zeros_maps
from fst.ops.zeros import nonzeros
from tests.kernels.convolutions import (
    DTYPES,
    FORMATS,
    PLAIN,
    THREADS,
    assert_as_exact,
    convolutions,
    exact,
    maps,
    of_list,
    operands,
    torchs,
)
from tests.kernels.values import with_threads

OPERANDS = ("input", "grad_output")

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


def grad_weight(c: dict, zeros_of: str, index=None, weight=None, mean=None, sums=None, last=True):
    return zeros_maps.maps_grad_weight(
        *(c["grad_output"], c["input"], index, weight, mean, sums, c["weight"].shape),
        *(*c["geometry"], last, zeros_of),
    )


def assert_products(c: dict, threads: int = 1) -> None:
    """All three products, the weight gradient by both operands."""
    bias = torch.randn(len(c["weight"])).to(c["weight"].dtype)
    wanted = exact(c, bias)
    same, arguments = torchs(c, bias), (c["input"], c["weight"], bias, *c["geometry"])
    found = with_threads(threads, zeros_maps.maps_output, *arguments)
    assert_as_exact(found, wanted.output, same.output)
    arguments = (c["grad_output"], c["weight"], c["input"].shape, *c["geometry"])
    found = with_threads(threads, zeros_maps.maps_grad_input, *arguments)
    assert_as_exact(found, wanted.grad_input, same.grad_input)
    for zeros_of in OPERANDS:
        for last in (True, False):
            found = with_threads(threads, grad_weight, c, zeros_of, None, None, None, None, last)
            assert found.is_contiguous(memory_format=FORMATS[last])
            assert_as_exact(found, wanted.grad_weight, same.grad_weight)


@pytest.mark.each_isa
@given(convolutions(least=4), THREADS)
def test_products(c, threads):
    assert_products(c, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [1, 3, 8, 9, 17])
def test_batches(samples, dtype):
    assert_products(operands(samples, 35, 70, (9, 7), (3, 3), dtype=dtype), 2)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("memory", FORMATS)
def test_strips_of_wide_and_high_maps(memory, stride):
    """More positions than a strip has, rows longer than a chunk, and several blocks of channels."""
    geometry = PLAIN._replace(stride=(stride, stride))
    for size in ((3, 530), (200, 5)):
        assert_products(operands(2, 72, 65, size, (3, 3), geometry, memory=[memory] * 3), 2)


@pytest.mark.parametrize("channels", [(4, 200), (200, 4), (130, 130)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 31)])
def test_blocks_of_channels(kernel, channels):
    assert_products(operands(1, *channels, (7, 33), kernel), 5)


@pytest.mark.each_isa
@given(convolutions(least=4), st.booleans(), st.sampled_from(OPERANDS), THREADS)
def test_lists(c, centred, zeros_of, threads):
    samples, _, rows, columns = c["grad_output"].shape
    chosen = torch.rand(samples * rows * columns) < 0.5
    index = chosen.nonzero().flatten().repeat_interleave(2)[::2].int()
    index = torch.cat([index, index[:1]]).sort().values  # one twice
    scale = torch.rand(len(index)) + 0.5
    mean = c["input"].float().mean((0, 2, 3)) if centred else None
    sums = torch.randn(len(c["weight"]), *c["weight"].shape[2:]) if centred else None
    found = with_threads(threads, grad_weight, c, zeros_of, index, scale, mean, sums)
    wanted, same = of_list(c, index, scale, mean, sums)
    assert_as_exact(found, wanted.grad_weight, same.grad_weight)


@pytest.mark.parametrize("zeros_of", OPERANDS)
def test_a_list_of_all_positions_is_the_whole_product(zeros_of):
    c = operands(3, 8, 16, (7, 6), (3, 3), PLAIN._replace(stride=(2, 1)))
    positions = c["grad_output"].numel() // 16
    index = torch.arange(positions, dtype=torch.int32)
    torch.testing.assert_close(grad_weight(c, zeros_of, index), grad_weight(c, zeros_of))


def test_only_zeros_give_zeros():
    c = operands(2, 8, 8, (6, 6), (3, 3), zeros=1.0)
    bias, size = torch.randn(8), c["input"].shape
    output = zeros_maps.maps_output(c["input"], c["weight"], bias, *PLAIN)
    assert torch.equal(output, bias.view(1, -1, 1, 1).expand_as(output))
    assert not zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN).any()
    assert not any(grad_weight(c, zeros_of).any() for zeros_of in OPERANDS)


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("changed", ["input", "grad_output", "weight"])
def test_what_is_not_finite_comes_out_where_nonzeros_multiply_it(changed, value, dtype):
    """There alone: neither where a zero multiplies it nor beside the image."""
    c = operands(2, 8, 8, (5, 5), (3, 3), dtype=dtype)
    c[changed][1, 3, 0, 0] = value
    size = c["input"].shape
    found = {
        "input": zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN),
        "grad_output": zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN),
    }
    gradients = {zeros_of: grad_weight(c, zeros_of) for zeros_of in OPERANDS}
    for zeros_of in OPERANDS:
        counted = {name: torch.ones_like(c[name]).float() for name in (*OPERANDS, "weight")}
        counted[zeros_of] = (c[zeros_of] != 0).float()
        counted[changed] = (~c[changed].isfinite()).float()
        d = {**c, **counted}
        if changed in (zeros_of, "weight"):
            products = {
                "input": torchs(d).output,
                "grad_output": torchs(d).grad_input,
            }
            assert torch.equal(~found[zeros_of].isfinite(), products[zeros_of] > 0.5)
        if changed != "weight":
            wanted = torchs(d).grad_weight > 0.5
            assert torch.equal(~gradients[zeros_of].isfinite(), wanted)


def test_a_zero_leaves_out_what_it_would_multiply():
    """0 · ∞ adds nothing, and -0.0 is a zero."""
    c = operands(1, 4, 4, (4, 4), (3, 3), zeros=0.0)
    c["input"][0, 2], c["weight"][:, 2] = -0.0, float("inf")
    assert zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN).isfinite().all()
    c["input"][0, 2, 1, 1], c["grad_output"][0, :, 0, 0] = float("nan"), 0.0
    found = grad_weight(c, "grad_output")
    assert found[:, [0, 1, 3]].isfinite().all()
    assert found[:, 2].isnan().sum() == 4 * 8  # but for the tap that dY's zeros multiply


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_multiplied(dtype):
    c = operands(1, 4, 4, (4, 4), (1, 1), PLAIN._replace(padding=(0, 0)), dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    c["input"].fill_(tiny)
    c["weight"].fill_(1024.0)
    output = zeros_maps.maps_output(c["input"], c["weight"], None, *c["geometry"])
    torch.testing.assert_close(output, exact(c).output.to(dtype))
    assert output.all() and nonzeros(c["input"], 1).tolist() == [64, 64]


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", FORMATS)
def test_count_of_nonzeros(memory, dtype):
    values = maps((3, 37, 20, 21), 0.4, dtype, memory)
    values[0, 0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 0.0])
    assert nonzeros(values, 1).tolist() == [int((values != 0).sum()), values.numel()]
    flat = values.permute(0, 2, 3, 1) if memory == torch.channels_last else values
    blocks = flat.flatten().split(4096)[::3]
    wanted = [sum(int((block != 0).sum()) for block in blocks), sum(map(len, blocks))]
    assert nonzeros(values, 3).tolist() == wanted
    assert nonzeros(values[:0], 3).tolist() == [0, 0]


def test_empty_batches_and_lists():
    c = operands(2, 4, 4, (4, 4), (3, 3))
    none = {**c, "input": c["input"][:0], "grad_output": c["grad_output"][:0]}
    arguments = (none["input"], c["weight"], None, *PLAIN)
    assert zeros_maps.maps_output(*arguments).shape == (0, 4, 4, 4)
    mean, sums = torch.randn(4), torch.randn(4, 3, 3)
    index, scale = torch.empty(0, dtype=torch.int32), torch.empty(0)
    share = torch.einsum("c,ohw->ochw", mean, sums)
    for zeros_of in OPERANDS:
        assert not grad_weight(none, zeros_of).any()
        torch.testing.assert_close(grad_weight(c, zeros_of, index, scale, mean, sums), share)


def test_calls_from_several_threads():
    c = operands(4, 40, 72, (14, 14), (3, 3))
    size, results = c["input"].shape, []

    def run() -> None:
        for _ in range(5):
            results.append(
                (
                    zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN),
                    zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN),
                    *(grad_weight(c, zeros_of) for zeros_of in OPERANDS),
                )
            )

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for found in results:
        for one, other in zip(found, results[0], strict=True):
            assert torch.equal(one, other)


def test_wrong_arguments_are_named():
    """tests/kernels/test_refusals_cpp.py has those of lists too."""
    c = operands(2, 3, 4, (5, 5), (3, 3))
    for zeros_of, reason in (("input", "index must be given"), ("weight", "zeros_of='weight'")):
        with pytest.raises(ValueError, match=reason):
            grad_weight(c, zeros_of, None, torch.ones(2))
    with pytest.raises(ValueError, match=r"bias torch.float32 \(5,\)"):
        zeros_maps.maps_output(c["input"], c["weight"], torch.ones(5), *PLAIN)
    with pytest.raises(ValueError, match="2147483647"):
        zeros_maps.maps_grad_input(c["grad_output"], c["weight"], (2**27, 3, 5, 5), *PLAIN)
    with pytest.raises(ValueError, match="every=0"):
        nonzeros(c["input"], 0)
    bad = ((2, 5, 5, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1), 3, 4, 1)  # an output map of 6 rows
    pointers = (c["input"].data_ptr(), c["weight"].data_ptr(), None, 0, False)
    with pytest.raises(ValueError, match="describe no operands"):
        cpp.kernel("fst_maps_product")(*pointers, cpp.integers(*bad[0]), *bad[1:], None, None)


def test_reasons_of_refusal():
    x, weight = torch.ones(2, 8, 5, 5), torch.ones(8, 8, 3, 3)
    assert zeros_maps.refuses_maps((x, weight), weight.shape, 1) == ""
    shape = weight.shape
    for arguments, reason in (
        (((x, weight.half()), shape, 1), "operands of torch.float32 and torch.float16"),
        (((x.double(), weight.double()), shape, 1), "operands of torch.float64"),
        (((x[..., ::2], weight), shape, 1), "neither contiguous nor channels_last"),
        (((x.to("meta"), weight), shape, 1), "no plain tensor"),
        (((x, weight), (8, 1, 3, 3), 8), "groups of fewer than 4 channels"),
        (((x, weight), (8, 8, 32, 1), 1), "more than 31 taps"),
    ):
        assert reason in zeros_maps.refuses_maps(*arguments)
