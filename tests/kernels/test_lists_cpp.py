"""The C++ kernels of lists of positions against float64: unfolded windows and matrix products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fst.ops import cpp
from fst.ops.backends.lists_cpp import list_grad_input, list_grad_weight
from fst.ops.positions.draw import draw_positions, measure_positions
from tests.cases import error
from tests.kernels.convolutions import (
    DTYPES,
    FORMATS,
    PLAIN,
    THREADS,
    assert_as_exact,
    convolutions,
    of_list,
    operands,
)
from tests.kernels.values import with_threads

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


@st.composite
def lists(draw) -> dict:
    """Operands of a convolution, and some of its positions with their weights."""
    c = draw(convolutions())
    positions = c["grad_output"][:, 0].numel()
    chosen = torch.rand(positions) < draw(st.sampled_from([0.03, 0.5, 1.0]))
    index, threads = chosen.nonzero().flatten().int(), draw(THREADS)
    return {**c, "index": index, "scale": torch.rand(len(index)) + 0.5, "threads": threads}


@pytest.mark.each_isa
@given(lists(), st.booleans(), st.booleans())
def test_grad_weight(c, centred, last):
    input, grad_output, weight = c["input"], c["grad_output"], c["weight"]
    mean = input.float().mean((0, 2, 3)) if centred else None
    sums = torch.randn(len(weight), *weight.shape[2:]) if centred else None
    arguments = (grad_output, input, c["index"], c["scale"], None, mean, sums, weight.shape)
    found = with_threads(c["threads"], list_grad_weight, *arguments, *c["geometry"], last)
    assert found.is_contiguous(memory_format=FORMATS[last])
    wanted, same = of_list(c, c["index"], c["scale"], mean, sums)
    assert_as_exact(found, wanted.grad_weight, same.grad_weight)


@pytest.mark.each_isa
@given(lists())
def test_grad_input(c):
    arguments = (c["grad_output"], c["weight"], c["index"], c["scale"], c["input"].shape)
    found = with_threads(c["threads"], list_grad_input, *arguments, *c["geometry"])
    if not c["grad_output"].is_contiguous():
        assert found.is_contiguous(memory_format=torch.channels_last)
    wanted, same = of_list(c, c["index"], c["scale"])
    assert_as_exact(found, wanted.grad_input, same.grad_input)


@pytest.mark.each_isa
@given(lists())
def test_scores_and_sums(c):
    grad_output, weight, (samples, _, *size) = c["grad_output"], c["weight"], c["input"].shape
    arguments = (grad_output, size, weight.shape[2:], *c["geometry"][:3])
    scores, sums = with_threads(c["threads"], measure_positions, *arguments, True)
    exact = grad_output.double().square().sum(1).sqrt().flatten()
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=0)
    stride, padding, dilation, _ = c["geometry"]
    ones = torch.ones(samples, 1, *size, dtype=torch.float64)
    inside = functional.unfold(ones, weight.shape[2:], dilation, padding, stride)
    inside = inside.view(samples, *weight.shape[2:], *grad_output.shape[2:])
    exact = torch.einsum("nrspq,ncpq->crs", inside, grad_output.double())
    single = torch.einsum("nrspq,ncpq->ncrspq", inside.float(), grad_output.float())
    assert_as_exact(sums, exact, single.sum((0, 4, 5)))
    alone, none = with_threads(c["threads"], measure_positions, *arguments, False)
    torch.testing.assert_close(alone, scores, rtol=1e-6, atol=0)
    assert none.shape == (0,)


@pytest.mark.parametrize("memory", FORMATS)
def test_long_sums_are_as_exact_as_torch(memory):
    grad_output = (torch.rand(24, 24, 56, 56) + 1).contiguous(memory_format=memory)
    _, sums = measure_positions(grad_output, (56, 56), (1, 1), (1, 1), (0, 0), (1, 1), True)
    exact = grad_output.double().sum((0, 2, 3))
    error = (sums.flatten() - exact).abs().max()
    assert error <= 2 * (grad_output.sum((0, 2, 3)) - exact).abs().max() + 1e-7 * exact.max()


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("channels", [(3, 24), (16, 24), (160, 96)])
def test_long_lists(channels, threads, memory):
    """Many chunks, shared by the threads or not, with rare positions in between."""
    c = operands(6, *channels, (40, 33), (3, 3), memory=[memory] * 3)
    chosen = torch.rand(6 * 40 * 33) < 0.6
    chosen[2 * 40 * 33 : 5 * 40 * 33] = False
    chosen[3 * 40 * 33 + 7] = True
    listed = (index := chosen.nonzero().flatten().int(), torch.rand(len(index)) + 0.5)
    (wanted, _), size = of_list(c, *listed), c["input"].shape
    arguments = (c["grad_output"], c["input"], *listed, None, None, None, c["weight"].shape)
    found = with_threads(threads, list_grad_weight, *arguments, *PLAIN, False)
    assert error(found, wanted.grad_weight) < 1e-6
    arguments = (c["grad_output"], c["weight"], *listed, size, *PLAIN)
    assert error(with_threads(threads, list_grad_input, *arguments), wanted.grad_input) < 1e-6


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 7, 8, 9, 12, 20, 33, 1001])
def test_tiles_of_a_row_of_the_kernel(channels, memory):
    """Numbers of channels on both sides of a tile, on images that are wider than what is packed at
    a time.
    """
    input = torch.randn(2, channels, 5, 70).contiguous(memory_format=memory)
    grad_output = torch.randn(2, 5, 5, 70).contiguous(memory_format=memory)
    index = torch.arange(2 * 5 * 70, dtype=torch.int32)
    mean, shape = torch.randn(channels), (5, channels, 3, 3)
    given = (grad_output, input, index, torch.ones(len(index)), None, mean, None)
    found = list_grad_weight(*given, shape, *PLAIN, False)
    less = input.double() - mean.view(-1, 1, 1)
    exact = torch.nn.grad.conv2d_weight(less, shape, grad_output.double(), padding=1)
    assert (found - exact).norm() < 1e-6 * exact.norm()


def test_rows_of_a_smaller_map():
    """Pair sums of grad_output, as Eq. 10 takes them: rows of a map of half the width."""
    input, grad_output = torch.randn(3, 5, 6, 8), torch.randn(3, 7, 6, 8)
    folded = grad_output[..., 0::2] + grad_output[..., 1::2]
    index = torch.arange(0, 3 * 6 * 8, 2, dtype=torch.int32)
    source = torch.arange(3 * 6 * 4, dtype=torch.int32)
    scale, shape = torch.ones(len(index)), (7, 5, 3, 3)
    for memory in FORMATS:
        rows = folded.contiguous(memory_format=memory)
        arguments = (rows, input, index, scale, source, None, None, shape)
        found = list_grad_weight(*arguments, *PLAIN, False)
        wide = torch.zeros_like(grad_output)
        wide[..., 0::2] = folded
        exact = torch.nn.grad.conv2d_weight(input, shape, wide, padding=1)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out(value, dtype):
    grad_output, input = torch.randn(2, 5, 4, 4).to(dtype), torch.randn(2, 3, 4, 4).to(dtype)
    weight = torch.randn(5, 3, 3, 3).to(dtype)
    grad_output[1, 2, 3, 0] = value
    scores, sums = measure_positions(grad_output, (4, 4), (3, 3), *PLAIN[:3], True)
    assert not scores[28].isfinite() and not sums[2].isfinite().all() and sums[0].isfinite().all()
    index, scale = draw_positions(scores, 3, torch.tensor(0.9, dtype=torch.float64))
    assert 28 in index and scale[index == 28] == 1
    shape = weight.shape
    arguments = (grad_output, input, index, scale, None, None, None, shape, *PLAIN)
    found = list_grad_weight(*arguments, False)
    assert not found[2].isfinite().all() and found[0].isfinite().all()
    arguments = (grad_output, weight, index, scale, input.shape, *PLAIN)
    assert not list_grad_input(*arguments)[1].isfinite().all()


def test_empty_lists_and_batches():
    weight = torch.randn(4, 3, 3, 3)
    none, nothing = torch.empty(0, dtype=torch.int32), torch.empty(0)
    for samples in (0, 2):
        grad_output, input = torch.randn(samples, 4, 5, 5), torch.randn(samples, 3, 5, 5)
        arguments = (grad_output, input, none, nothing, None, None, None, weight.shape)
        found = list_grad_weight(*arguments, *PLAIN, True)
        assert torch.equal(found, torch.zeros(4, 3, 3, 3))
        found = list_grad_input(grad_output, weight, none, nothing, input.shape, *PLAIN)
        assert torch.equal(found, torch.zeros(samples, 3, 5, 5))
    scores, sums = measure_positions(grad_output[:0], (5, 5), (3, 3), *PLAIN[:3], True)
    assert len(scores) == 0 and torch.equal(sums, torch.zeros(4, 3, 3))


def test_an_empty_list_leaves_the_share_of_the_mean():
    """As where all drawn positions lie in the other half of the batch."""
    none, nothing = torch.empty(0, dtype=torch.int32), torch.empty(0)
    mean, sums, shape = torch.randn(6), torch.randn(4, 3, 3), (4, 3, 3, 3)
    given = (torch.randn(2, 4, 5, 5), torch.randn(2, 6, 5, 5), none, nothing, None)
    found = list_grad_weight(*given, mean, sums, shape, *PLAIN[:3], 2, False)
    wanted = torch.einsum("oc,ohw->ochw", mean.view(2, 3).repeat_interleave(2, 0), sums)
    torch.testing.assert_close(found, wanted)


def test_scores_of_another_type_are_named():
    with pytest.raises(ValueError, match=r"scores torch.float64"):
        draw_positions(torch.ones(3).double(), 2, torch.tensor(0.0, dtype=torch.float64))


def test_what_does_not_fit_is_refused():
    values = torch.ones(2, 4, 3, 3)
    assert not cpp.refuses(values, values.contiguous(memory_format=torch.channels_last))
    assert cpp.refuses(values.double())
    assert cpp.refuses(values, values.half())
    assert cpp.refuses(values[:, ::2])
    assert cpp.refuses(values[0])
    assert cpp.refuses(values.to("meta"))
