"""The C++ kernels that leave out zeros of the weight, against products in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fst.ops import cpp
from fst.ops.backends import zeros_weight as zeros
from fst.ops.geometry import Geometry, is_channels_last, output_shape
from tests.cases import error
from tests.kernels.convolutions import (
    DTYPES,
    FORMATS,
    PLAIN,
    THREADS,
    assert_as_exact,
    convolutions,
    exact,
    operands,
    torchs,
)
from tests.kernels.values import with_threads

LANES = (0, 1, 2)

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

products = convolutions(samples=(1, 3, 8, 9, 17))
lanes_of_all = st.sampled_from(LANES)


def lists_of(weight: Tensor, size, geometry: Geometry, lanes: int = 0) -> Tensor:
    """The compressed weight of Y, for inputs of this size."""
    numbers = zeros.product_numbers(size, weight.shape, geometry, False, lanes)
    return zeros.lists_of(weight, numbers)


def by_lists(input: Tensor, lists: Tensor, shape, geometry: Geometry, lanes: int = 0) -> Tensor:
    """Y of a compressed weight of this shape, by the kernel itself."""
    numbers = zeros.product_numbers(input.shape, shape, geometry, False, lanes)
    found = torch.empty(output_shape(input.shape, shape, geometry), dtype=input.dtype)
    found = found.contiguous(memory_format=memory_of(input))
    layouts = [x.is_contiguous(memory_format=torch.channels_last) for x in (input, found)]
    cpp.kernel("fst_zeros_product")(
        *(input.data_ptr(), cpp.KINDS[input.dtype], cpp.integers(*layouts)),
        *(cpp.integers(*numbers), lists.data_ptr(), 8 * len(lists)),
        *(None, None, 0, found.data_ptr()),
    )
    return found


def memory_of(maps: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(maps) else torch.contiguous_format


def output(input: Tensor, weight: Tensor, geometry: Geometry = PLAIN, *, lanes: int = 0) -> Tensor:
    return zeros.zeros_output(input, weight, None, None, None, *geometry, 0, lanes)


def gradient(
    grad_output: Tensor, weight: Tensor, size, geometry: Geometry = PLAIN, *, lanes: int = 0
) -> Tensor:
    return zeros.zeros_grad_input(grad_output, weight, size, *geometry, lanes)


@pytest.mark.each_isa
@given(products, lanes_of_all, THREADS)
def test_output(c, lanes, threads):
    input, weight, geometry = c["input"], c["weight"], c["geometry"]
    arguments = (input, weight, None, None, None, *geometry, 0, lanes)
    found = with_threads(threads, zeros.zeros_output, *arguments)
    assert found.is_contiguous() or found.is_contiguous(memory_format=torch.channels_last)
    if not input.is_contiguous():
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert_as_exact(found, exact(c).output, torchs(c).output)


@pytest.mark.each_isa
@given(products, lanes_of_all, THREADS)
def test_grad_input(c, lanes, threads):
    arguments = (c["grad_output"], c["weight"], c["input"].shape, *c["geometry"], lanes)
    found = with_threads(threads, zeros.zeros_grad_input, *arguments)
    if not c["grad_output"].is_contiguous():
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert_as_exact(found, exact(c).grad_input, torchs(c).grad_input)


@pytest.mark.each_isa
@given(products, lanes_of_all, THREADS, st.integers(0, 4), st.booleans(), st.booleans())
def test_bias_residual_and_activation(c, lanes, threads, activation, with_bias, with_residual):
    input, weight, geometry = c["input"], c["weight"], c["geometry"]
    single = {name: c[name].float() for name in ("input", "weight", "grad_output")}
    bias = torch.randn(len(weight)) if with_bias else None
    wanted, same = exact(c, bias).output, torchs({**c, **single}, bias).output
    residual = None
    if with_residual:
        residual = torch.empty_like(output(input, weight, geometry)).normal_()
        wanted, same = wanted + residual.double(), same + residual
    arguments = (input, weight, None, bias, residual, *geometry, activation, lanes)
    found = with_threads(threads, zeros.zeros_output, *arguments)
    if activation:
        function = getattr(functional, zeros.ACTIVATIONS[activation])
        wanted, same = function(wanted), function(same)
    assert_as_exact(found, wanted, same.to(input.dtype))


@given(products, lanes_of_all, THREADS)
def test_lists_serve_many_calls(c, lanes, threads):
    input, weight, geometry = c["input"], c["weight"], c["geometry"]
    lists = with_threads(threads, lists_of, weight, input.shape, geometry, lanes)
    wanted = output(input, weight, geometry, lanes=lanes)
    for _ in range(2):
        assert torch.equal(by_lists(input, lists, weight.shape, geometry, lanes), wanted)
        kept = zeros.zeros_output(input, weight, lists, None, None, *geometry, 0, lanes)
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("samples", [1, 8, 9])
@pytest.mark.parametrize("channels", [(64, 40), (37, 130), (300, 20)])
def test_many_blocks_of_channels_and_strips(channels, samples, memory):
    for stride in ((1, 1), (2, 2), (3, 2)):
        geometry = PLAIN._replace(stride=stride)
        c = operands(samples, *channels, (11, 37), (3, 3), geometry, memory=[memory] * 3, kept=0.25)
        wanted, weight, size = exact(c), c["weight"], c["input"].shape
        for lanes in (1, 2):
            found = output(c["input"], weight, geometry, lanes=lanes)
            assert error(found, wanted.output) < 1e-6
            found = gradient(c["grad_output"], weight, size, geometry, lanes=lanes)
            assert error(found, wanted.grad_input) < 1e-6


@pytest.mark.parametrize("shape", [(1, 48, 1, 100), (5, 48, 1, 1), (3, 7, 1, 50), (64, 33, 1, 1)])
def test_tokens_of_a_linear_layer(shape):
    input = torch.randn(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    weight = torch.randn(29, shape[1], 1, 1) * (torch.rand(29, shape[1], 1, 1) < 0.5)
    geometry = PLAIN._replace(padding=(0, 0))
    wanted = functional.conv2d(input.double(), weight.double())
    for lanes in LANES:
        assert error(output(input, weight, geometry, lanes=lanes), wanted) < 1e-6


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_what_a_weight_connects(value, lanes, dtype):
    input = torch.randn(9, 6, 5, 12).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(10, 6, 3, 3).to(dtype)
    weight[::2, 3] = 0
    input[4, 3, 2, 7] = value
    found = output(input, weight, lanes=lanes)
    assert not found[4, 1::2, 1:4, 6:9].isfinite().any()
    assert found[4, ::2].isfinite().all() and found[3].isfinite().all()
    found = gradient(input, weight.transpose(0, 1).contiguous(), (9, 10, 5, 12), lanes=lanes)
    assert not found[4, 1::2, 1:4, 6:9].isfinite().any()
    assert found[4, ::2].isfinite().all() and found[3].isfinite().all()
    input[4, 3, 2, 7] = 1
    weight[5, 2, 1, 1] = value
    found = output(input, weight, lanes=lanes)
    assert not found[:, 5].isfinite().any() and found[:, 4].isfinite().all()


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_adds_nothing_where_its_tap_meets_no_output(
    value, memory, dtype
):
    grad_output = torch.randn(9, 7, 5, 6).to(dtype).contiguous(memory_format=memory)
    weight = torch.randn(7, 6, 3, 3).to(dtype)
    weight[2, 3, 0, 0] = value
    for lanes in LANES:
        found = gradient(grad_output, weight, (9, 6, 5, 6), lanes=lanes)
        is_reached = torch.zeros(9, 6, 5, 6, dtype=torch.bool)
        is_reached[:, 3, :-1, :-1] = True
        assert torch.equal(found.isfinite(), ~is_reached)
        assert found.is_contiguous(memory_format=memory)


@pytest.mark.parametrize("lanes", LANES)
def test_signed_zeros_are_left_out_and_subnormal_weights_are_not(lanes):
    input, weight = torch.full((3, 1, 4, 4), float("inf")), torch.zeros(2, 1, 1, 1)
    weight[0] = -0.0
    weight[1] = 1e-42
    geometry = PLAIN._replace(padding=(0, 0))
    found = output(input, weight, geometry, lanes=lanes)
    assert torch.equal(found[:, 0], torch.zeros(3, 4, 4))
    assert torch.equal(found[:, 1], input[:, 0])


def test_pixels_that_no_tap_reaches_are_zero():
    geometry = Geometry((3, 2), (0, 0), (1, 1), 1)
    grad_output, weight = torch.randn(2, 5, 3, 4), torch.randn(5, 6, 1, 1)
    for lanes in LANES:
        found = gradient(grad_output, weight, (2, 6, 9, 8), geometry, lanes=lanes)
        reached = torch.zeros(9, 8, dtype=torch.bool)
        reached[::3, ::2] = True
        assert torch.equal(found[..., ~reached], torch.zeros(2, 6, 60))
        assert found[..., reached].ne(0).all()


def test_calls_from_many_threads():
    torch.manual_seed(0)
    input = torch.randn(9, 24, 14, 14).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(16, 24, 3, 3) * (torch.rand(16, 24, 3, 3) < 0.5) for _ in range(8)]
    wanted = [output(input, weight) for weight in weights]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: output(input, weight), weights * 4))
    assert all(torch.equal(y, wanted[i % 8]) for i, y in enumerate(found))


@pytest.mark.parametrize("samples", [1, 3, 16, 33])
def test_results_do_not_depend_on_threads(samples):
    input, weight = torch.randn(samples, 20, 9, 30), torch.randn(24, 20, 3, 3)
    wanted = with_threads(1, output, input, weight)
    for threads in (2, 3, 8, 40):
        assert torch.equal(with_threads(threads, output, input, weight), wanted)


def test_lists_of_another_product_are_refused():
    input, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3)
    lists = lists_of(weight, input.shape, PLAIN)
    runs = lists.clone()
    runs[9] = len(weight.flatten()) + 1
    backward = zeros.product_numbers(input.shape, weight.shape, PLAIN, True)
    others = (lists[:-1], lists[:0], torch.zeros_like(lists), runs)
    for wrong in (*others, zeros.lists_of(weight, backward)):
        with pytest.raises(ValueError, match="describe no operands"):
            by_lists(input, wrong, weight.shape, PLAIN)
        kept = zeros.zeros_output(input, weight, wrong, None, None, *PLAIN)  # it makes its own
        assert torch.equal(kept, output(input, weight))
    with pytest.raises(ValueError, match="must come from lists_of"):
        zeros.zeros_output(input, weight, lists.int(), None, None, *PLAIN)


@pytest.mark.each_isa
def test_lists_with_any_offsets_read_nothing_outside():
    """A list from a damaged file gives other numbers, and no fault."""
    input, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3)
    lists = lists_of(weight, input.shape, PLAIN)
    size = weight.numel() * 6 // 8
    lists[-size // 3 :] = -1
    found = by_lists(input, lists, weight.shape, PLAIN)
    assert found.shape == (2, 8, 9, 9)


def test_what_is_refused_and_why():
    input, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3)
    many = PLAIN._replace(stride=(17, 1))
    for operand, kernel, geometry, reason in (
        (input.double(), weight.double(), PLAIN, "float64"),
        (input.half(), weight, PLAIN, "float16 and torch.float32"),
        (input.to("meta"), weight, PLAIN, "CPU"),
        (input[..., ::2], weight, PLAIN, "contiguous"),
        (input[0], weight, PLAIN, "four axes"),
        (input[:0], weight, PLAIN, "no elements"),
        (input, weight[:, :1].contiguous(), PLAIN._replace(groups=8), "groups of fewer than 4"),
        (input, weight, many, "more than 16"),
        (input[:, :7], weight, PLAIN, "contiguous"),
        (input[:, :7].contiguous(), weight, PLAIN, "do not belong together"),
        (input, weight, PLAIN._replace(dilation=(9, 1)), "do not belong together"),
    ):
        assert reason in zeros.refuses_zeros(operand, kernel, geometry)
    assert zeros.refuses_zeros(input, weight, PLAIN) == ""
    assert zeros.refuses_zeros(input, torch.nn.Parameter(weight), PLAIN) == ""
    assert zeros.refuses_zeros(input, weight, PLAIN, (2, 8, 9, 9)) == ""


def test_wrong_arguments_are_named():
    input, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3)
    with pytest.raises(TypeError, match=r"input has dtype .*float32, weight has dtype .*float16"):
        output(input, weight.half())
    with pytest.raises(ValueError, match=r"takes 8 channels, not those of an input \(2, 7, 9, 9\)"):
        output(input[:, :7].contiguous(), weight)
    with pytest.raises(ValueError, match="groups=3 must divide 8"):
        output(input, weight, PLAIN._replace(groups=3))
    with pytest.raises(ValueError, match=r"dilation=\(9, 9\) is larger than an input"):
        output(input, weight, PLAIN._replace(dilation=(9, 9)))
    with pytest.raises(ValueError, match="must have the shape"):
        gradient(input, weight, (2, 8, 10, 9))
    with pytest.raises(ValueError, match="bias"):
        zeros.zeros_output(input, weight, None, torch.ones(7), None, *PLAIN)
    with pytest.raises(ValueError, match="residual"):
        zeros.zeros_output(input, weight, None, None, torch.ones(2, 8, 9, 8), *PLAIN)
    for lanes, activation in ((3, 0), (0, 5), (-1, 0)):
        with pytest.raises(ValueError, match="describe no operands"):
            zeros.zeros_output(input, weight, None, None, None, *PLAIN, activation, lanes)
