"""The C++ kernels of lists of positions against float64: unfolded windows and matrix products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fst.ops import cpp
from fst.ops.backends.lists_cpp import list_grad_input, list_grad_weight
from fst.ops.positions.draw import draw_positions, measure_positions
from tests.cases import without_onednn
from tests.kernels.values import with_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.contiguous_format, torch.channels_last)

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

pairs = st.tuples(st.integers(1, 3), st.integers(1, 2))


@st.composite
def convolutions(draw) -> dict:
    """Operands of a convolution with an output map, in any dtype and memory format."""
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (1, 3), (5, 2), (7, 7)]))
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 2)))
    size = draw(st.tuples(st.integers(1, 15), st.integers(1, 15)))
    span = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = tuple(max(size[i], span[i] - 2 * padding[i]) for i in range(2))
    rows, columns = ((size[i] + 2 * padding[i] - span[i]) // stride[i] + 1 for i in range(2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inside, out = draw(st.integers(1, 35)), draw(st.integers(1, 70)) * groups
    samples = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shapes = {
        "input": (samples, inside * groups, *size),
        "grad_output": (samples, out, rows, columns),
        "weight": (out, inside, *kernel),
    }
    tensors = {
        name: (torch.randn(shape) + 0.5)
        .to(dtype)
        .contiguous(memory_format=draw(st.sampled_from(FORMATS)))
        for name, shape in shapes.items()
    }
    positions = samples * rows * columns
    chosen = torch.rand(positions) < draw(st.sampled_from([0.03, 0.5, 1.0]))
    index = chosen.nonzero().flatten().int()
    return {
        **tensors,
        "index": index,
        "scale": torch.rand(len(index)) + 0.5,
        "geometry": (stride, padding, dilation),
        "groups": groups,
        "threads": draw(st.sampled_from([1, 2, 5])),
    }


def unfolded(input: Tensor, weight: Tensor, geometry: tuple, groups: int) -> Tensor:
    """Windows (N·P·Q, groups, Cin/groups·kh·kw)."""
    stride, padding, dilation = geometry
    columns = functional.unfold(input, weight.shape[2:], dilation, padding, stride)
    return columns.unflatten(1, (groups, -1)).permute(0, 3, 1, 2).flatten(0, 1)


def rows_of(grad_output: Tensor, groups: int) -> Tensor:
    """(N·P·Q, groups, Cout/groups)."""
    return grad_output.permute(0, 2, 3, 1).flatten(0, 2).unflatten(1, (groups, -1))


def spread(grad_output: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """grad_output with its positions' weights, 0 where the list has none."""
    samples, _, rows, columns = grad_output.shape
    factors = torch.zeros(samples * rows * columns, dtype=grad_output.dtype)
    factors.index_add_(0, index.long(), scale.to(grad_output.dtype))
    return grad_output * factors.view(samples, 1, rows, columns)


def dense(mask: list[bool], c: dict, grad_output: Tensor, input: Tensor) -> Tensor:
    """Torch's own gradient in the dtype of the operands."""
    arguments = (grad_output, input, c["weight"], None, *c["geometry"], False, [0, 0])
    with without_onednn(input.shape[-1] < c["geometry"][0][1]):
        found = torch.ops.aten.convolution_backward(*arguments, c["groups"], mask)
    return found[mask.index(True)]


def assert_as_exact(found: Tensor, exact: Tensor, same: Tensor) -> None:
    """Error at most twice that of torch's result, and one rounding of the largest number."""
    allowed = 2 * (same.double() - exact).norm() + torch.finfo(found.dtype).eps * exact.norm()
    assert (found.double() - exact).norm() <= allowed


@pytest.mark.each_isa
@given(convolutions(), st.booleans(), st.booleans())
def test_grad_weight(c, centred, last):
    input, grad_output, weight = c["input"], c["grad_output"], c["weight"]
    mean = input.float().mean((0, 2, 3)) if centred else None
    sums = torch.randn(len(weight), *weight.shape[2:]) if centred else None
    arguments = (grad_output, input, c["index"], c["scale"], None, mean, sums, weight.shape)
    found = with_threads(
        c["threads"], list_grad_weight, *arguments, *c["geometry"], c["groups"], last
    )
    assert found.shape == weight.shape and found.dtype == weight.dtype
    assert found.is_contiguous(memory_format=FORMATS[last])
    less = mean.view(1, -1, 1, 1) if centred else 0
    windows = unfolded(input.double() - less, weight, c["geometry"], c["groups"])
    rows = rows_of(spread(grad_output.double(), c["index"], c["scale"]), c["groups"])
    exact = torch.einsum("kgo,kgi->goi", rows, windows).reshape(weight.shape)
    spread_rows = spread(grad_output, c["index"], c["scale"])
    same = dense([False, True, False], c, spread_rows, (input - less).to(input.dtype))
    if centred:
        means = mean.view(c["groups"], -1).repeat_interleave(len(weight) // c["groups"], 0)
        share = torch.einsum("oc,ohw->ochw", means.double(), sums.double())
        exact, same = exact + share, (same + share).to(same.dtype)
    assert_as_exact(found, exact, same)


@pytest.mark.each_isa
@given(convolutions())
def test_grad_input(c):
    grad_output, weight, size = c["grad_output"], c["weight"], c["input"].shape
    arguments = (grad_output, weight, c["index"], c["scale"], size, *c["geometry"], c["groups"])
    found = with_threads(c["threads"], list_grad_input, *arguments)
    assert found.shape == size and found.dtype == weight.dtype
    if not grad_output.is_contiguous():
        assert found.is_contiguous(memory_format=torch.channels_last)
    stride, padding, dilation = c["geometry"]
    rows = rows_of(spread(grad_output.double(), c["index"], c["scale"]), c["groups"])
    matrix = weight.double().unflatten(0, (c["groups"], -1)).flatten(2)
    columns = torch.einsum("kgo,goi->kgi", rows, matrix)
    columns = columns.flatten(1).view(size[0], -1, columns[0].numel()).transpose(1, 2)
    exact = functional.fold(columns, size[2:], weight.shape[2:], dilation, padding, stride)
    spread_rows = spread(grad_output, c["index"], c["scale"])
    same = dense([True, False, False], c, spread_rows, c["input"])
    assert_as_exact(found, exact, same)


@pytest.mark.each_isa
@given(convolutions())
def test_scores_and_sums(c):
    grad_output, weight, (samples, _, *size) = c["grad_output"], c["weight"], c["input"].shape
    arguments = (grad_output, size, weight.shape[2:], *c["geometry"])
    scores, sums = with_threads(c["threads"], measure_positions, *arguments, True)
    exact = grad_output.double().square().sum(1).sqrt().flatten()
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=0)
    stride, padding, dilation = c["geometry"]
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
    inside, out = channels
    input = torch.randn(6, inside, 40, 33).contiguous(memory_format=memory)
    grad_output = torch.randn(6, out, 40, 33).contiguous(memory_format=memory)
    weight = torch.randn(out, inside, 3, 3)
    chosen = torch.rand(6 * 40 * 33) < 0.6
    chosen[2 * 40 * 33 : 5 * 40 * 33] = False
    chosen[3 * 40 * 33 + 7] = True
    index = chosen.nonzero().flatten().int()
    scale = torch.rand(len(index)) + 0.5
    geometry = ((1, 1), (1, 1), (1, 1))
    arguments = (
        grad_output,
        input,
        index,
        scale,
        None,
        None,
        None,
        weight.shape,
        *geometry,
        1,
    )
    found = with_threads(threads, list_grad_weight, *arguments, False)
    rows = spread(grad_output.double(), index, scale)
    exact = torch.nn.grad.conv2d_weight(input.double(), weight.shape, rows, padding=1)
    assert (found - exact).norm() < 1e-6 * exact.norm()
    arguments = (grad_output, weight, index, scale, input.shape, *geometry, 1)
    found = with_threads(threads, list_grad_input, *arguments)
    exact = torch.nn.grad.conv2d_input(input.shape, weight.double(), rows, padding=1)
    assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 7, 8, 9, 12, 20, 33, 1001])
def test_tiles_of_a_row_of_the_kernel(channels, memory):
    """Numbers of channels on both sides of a tile, on images that are wider than what is packed at
    a time.
    """
    input = torch.randn(2, channels, 5, 70).contiguous(memory_format=memory)
    grad_output = torch.randn(2, 5, 5, 70).contiguous(memory_format=memory)
    index = torch.arange(2 * 5 * 70, dtype=torch.int32)
    mean, shape, geometry = torch.randn(channels), (5, channels, 3, 3), ((1, 1), (1, 1), (1, 1))
    operands = (grad_output, input, index, torch.ones(len(index)), None, mean, None)
    found = list_grad_weight(*operands, shape, *geometry, 1, False)
    less = input.double() - mean.view(-1, 1, 1)
    exact = torch.nn.grad.conv2d_weight(less, shape, grad_output.double(), padding=1)
    assert (found - exact).norm() < 1e-6 * exact.norm()


def test_rows_of_a_smaller_map():
    """Pair sums of grad_output, as Eq. 10 takes them: rows of a map of half the width."""
    input, grad_output = torch.randn(3, 5, 6, 8), torch.randn(3, 7, 6, 8)
    folded = grad_output[..., 0::2] + grad_output[..., 1::2]
    index = torch.arange(0, 3 * 6 * 8, 2, dtype=torch.int32)
    source = torch.arange(3 * 6 * 4, dtype=torch.int32)
    geometry = ((1, 1), (1, 1), (1, 1))
    for memory in FORMATS:
        rows = folded.contiguous(memory_format=memory)
        scale = torch.ones(len(index))
        shape = (7, 5, 3, 3)
        arguments = (
            rows,
            input,
            index,
            scale,
            source,
            None,
            None,
            shape,
            *geometry,
            1,
            False,
        )
        found = list_grad_weight(*arguments)
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
    geometry = ((1, 1), (1, 1), (1, 1))
    scores, sums = measure_positions(grad_output, (4, 4), (3, 3), *geometry, True)
    assert not scores[28].isfinite() and not sums[2].isfinite().all() and sums[0].isfinite().all()
    index, scale = draw_positions(scores, 3, torch.tensor(0.9, dtype=torch.float64))
    assert 28 in index and scale[index == 28] == 1
    shape = weight.shape
    arguments = (grad_output, input, index, scale, None, None, None, shape, *geometry, 1)
    found = list_grad_weight(*arguments, False)
    assert not found[2].isfinite().all() and found[0].isfinite().all()
    arguments = (grad_output, weight, index, scale, input.shape, *geometry, 1)
    assert not list_grad_input(*arguments)[1].isfinite().all()


def test_empty_lists_and_batches():
    geometry = ((1, 1), (1, 1), (1, 1))
    weight = torch.randn(4, 3, 3, 3)
    none, nothing = torch.empty(0, dtype=torch.int32), torch.empty(0)
    for samples in (0, 2):
        grad_output, input = torch.randn(samples, 4, 5, 5), torch.randn(samples, 3, 5, 5)
        found = list_grad_weight(
            *(
                grad_output,
                input,
                none,
                nothing,
                None,
                None,
                None,
                weight.shape,
                *geometry,
                1,
                True,
            )
        )
        assert torch.equal(found, torch.zeros(4, 3, 3, 3))
        found = list_grad_input(*(grad_output, weight, none, nothing, input.shape, *geometry, 1))
        assert torch.equal(found, torch.zeros(samples, 3, 5, 5))
    scores, sums = measure_positions(grad_output[:0], (5, 5), (3, 3), *geometry, True)
    assert len(scores) == 0 and torch.equal(sums, torch.zeros(4, 3, 3))


def test_an_empty_list_leaves_the_share_of_the_mean():
    """As where all drawn positions lie in the other half of the batch."""
    none, nothing = torch.empty(0, dtype=torch.int32), torch.empty(0)
    mean, sums, shape = torch.randn(6), torch.randn(4, 3, 3), (4, 3, 3, 3)
    geometry = ((1, 1), (1, 1), (1, 1))
    operands = (torch.randn(2, 4, 5, 5), torch.randn(2, 6, 5, 5), none, nothing, None)
    found = list_grad_weight(*operands, mean, sums, shape, *geometry, 2, False)
    wanted = torch.einsum("oc,ohw->ochw", mean.view(2, 3).repeat_interleave(2, 0), sums)
    torch.testing.assert_close(found, wanted)


def test_wrong_arguments_are_named():
    geometry = ((1, 1), (1, 1), (1, 1))
    grad_output, input, weight = (
        torch.ones(2, 4, 5, 5),
        torch.ones(2, 3, 5, 5),
        torch.ones(4, 3, 3, 3),
    )
    index, scale = torch.tensor([3, 7], dtype=torch.int32), torch.ones(2)

    def run(**changed):
        given = dict(g=grad_output, x=input, i=index, s=scale, r=None, m=None, t=None) | changed
        return list_grad_weight(*given.values(), weight.shape, *geometry, 1, False)

    for changed, reason in (
        ({"i": torch.tensor([7, 3], dtype=torch.int32)}, "index must be ascending"),
        ({"i": torch.tensor([7, 50], dtype=torch.int32)}, "positions of the output map"),
        ({"i": torch.tensor([-1, 5], dtype=torch.int32)}, "positions of the output map"),
        ({"i": torch.tensor([3, 7])}, "index torch.int64"),
        ({"s": torch.ones(3)}, r"weight torch.float32 \(3,\)"),
        ({"r": torch.tensor([0, 50], dtype=torch.int32)}, "source from 0 to 50"),
        ({"r": index, "g": torch.ones(2, 5, 3, 3)}, "must have 4 channels"),
        ({"m": torch.ones(4)}, r"mean torch.float32 \(4,\)"),
        ({"t": torch.ones(4, 3)}, r"sums torch.float32 \(4, 3\)"),
        ({"g": torch.ones(2, 4, 5, 6)}, "must have the shape"),
        ({"x": torch.ones(2, 6, 5, 5)}, "takes 3 channels"),
        ({"x": input.half()}, "input has dtype torch.float16"),
        ({"g": grad_output[:, ::2]}, "contiguous or channels_last"),
    ):
        with pytest.raises((TypeError, ValueError), match=reason):
            run(**changed)
    assert run().shape == weight.shape
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
