"""The three products of a convolution without the zeros of its maps, by the C++ kernels.

The results are those of the dense products, up to the order of their sums. A zero is left out
whatever it is multiplied by: 0 · ∞ and 0 · NaN add nothing, where a dense product adds NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fst.ops.cpp.library import (
    KINDS,
    MOST_POSITIONS,
    check_list,
    check_map,
    check_operands,
    check_plain,
    convolution,
    integers,
    kernel,
    missing,
    operator,
    refuses_operands,
)
from fst.ops.geometry import (
    Geometry,
    empty_maps,
    geometry_of,
    is_channels_last,
    output_shape,
    positions_of,
    share_of_mean,
)

MOST_TAPS = 31  # of a kernel along an axis
LEAST_CHANNELS = 4  # of a group
Numbers = tuple[ctypes.Array, int, int, int]  # of a convolution; channels of a group, and groups


def refuses_maps(operands: Sequence[Tensor], weight_shape: Sequence[int], groups: int) -> str:
    """The reason why these kernels cannot take a product of a convolution; "" if they can.

    Args:
        operands: the two tensors (N, C, H, W) that are multiplied.
        weight_shape: (Cout, Cin/groups, kh, kw).
    """
    if reason := missing() or refuses_operands(*operands):
        return reason
    out, inside, *kernel = weight_shape
    if min(out // groups, inside) < LEAST_CHANNELS:
        return f"groups of fewer than {LEAST_CHANNELS} channels"
    if max(kernel) > MOST_TAPS:
        return f"a kernel of more than {MOST_TAPS} taps along an axis"
    places = max(x.numel() // max(x.shape[1], 1) for x in operands)
    if max(places, out * inside * kernel[0] * kernel[1]) > MOST_POSITIONS:
        return f"more than {MOST_POSITIONS} places or weights"
    return ""


def _like_output(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    geometry = geometry_of(stride, padding, dilation, groups)
    shape = output_shape(input.shape, weight.shape, geometry)
    return empty_maps(shape, input, is_channels_last(input))


@operator(like=_like_output, tensors=3)
def maps_output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[..., Tensor]:
    """Y = W·X + bias without the zeros of X.

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw).
        bias: (Cout,) in the dtype of the input.

    Returns:
        (N, Cout, P, Q) in the dtype and memory format of the input.
    """
    check_operands(input=input, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input.shape, weight.shape, geometry)
    check_plain(input.dtype, (len(weight),), bias=bias)
    like = _like_output(input, weight, *geometry)
    return _product(input, weight, False, like, numbers)


def _like_grad_input(grad_output: Tensor, input_size: Sequence[int]) -> Tensor:
    return empty_maps(input_size, grad_output, is_channels_last(grad_output))


@operator(like=_like_grad_input, tensors=2)
def maps_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[..., Tensor]:
    """dX = Wᵀ·dY without the zeros of dY.

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw).
        input_size: (N, Cin, H, W).

    Returns:
        dX of ``input_size``, in the dtype and memory format of grad_output.
    """
    check_operands(grad_output=grad_output, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input_size, weight.shape, geometry)
    check_map(grad_output, input_size, weight.shape, geometry)
    like = _like_grad_input(grad_output, input_size)
    return _product(grad_output, weight, True, like, numbers)


def _like_grad_weight(
    grad_output: Tensor, weight_shape: Sequence[int], channels_last: bool
) -> Tensor:
    return empty_maps(weight_shape, grad_output, channels_last)


@operator(like=_like_grad_weight, tensors=6)
def maps_grad_weight(
    grad_output: Tensor,
    input: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    sums: Tensor | None,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
    zeros_of: str,
) -> Callable[..., Tensor]:
    """dW = dY·Xᵀ without the zeros of X or of dY; over a list of output positions, if one is given:
    Σ_j weight_j · dY[index_j] · (X − mean)[window j]ᵀ, and sums · meanᵀ for each tap.

    Args:
        grad_output: (N, Cout, P, Q).
        input: (N, Cin, H, W).
        index: (n,) int32, positions of the output map, ascending; None: all of them.
        weight: (n,) float32; None: 1 everywhere. Positions whose weights add up to 0 are left out.
        mean: (Cin,) float32, with a list: subtracted from the input inside the image.
        sums: (Cout, kh, kw) float32, which ``mean`` is multiplied by; None: nothing is added.
        weight_shape: (Cout, Cin/groups, kh, kw).
        channels_last: the memory format of the result.
        zeros_of: "input" or "grad_output", whose zeros are left out.

    Returns:
        dW of ``weight_shape``, in the dtype of grad_output.
    """
    check_operands(grad_output=grad_output, input=input)
    if zeros_of not in ("input", "grad_output"):
        raise ValueError(f"zeros_of={zeros_of!r} must be 'input' or 'grad_output'.")
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input.shape, weight_shape, geometry)
    check_map(grad_output, input.shape, weight_shape, geometry)
    if index is None and not (weight is mean is sums is None):
        raise ValueError("weight, mean and sums belong to a list: index must be given.")
    if index is not None:
        check_list(index, weight, positions_of(grad_output))
    check_plain(torch.float32, (input.shape[1],), mean=mean)
    check_plain(torch.float32, (weight_shape[0], *weight_shape[2:]), sums=sums)
    like = _like_grad_weight(grad_output, weight_shape, channels_last)
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(like))
    run, last = kernel("fst_maps_grad_weight"), (*numbers, integers(*layouts))
    first = KINDS[input.dtype], zeros_of == "input"
    shape, strides = like.shape, like.stride()
    is_empty = not grad_output.numel() or not like.numel()

    def multiply(
        grad_output: Tensor,
        input: Tensor,
        index: Tensor | None = None,
        weight: Tensor | None = None,
        mean: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if is_empty or (index is not None and not index.numel()):
            if mean is None or sums is None:
                return result.zero_()
            return result.copy_(share_of_mean(sums, mean, groups))
        if index is not None and weight is None:
            weight = torch.ones(len(index), dtype=torch.float32)
        run(
            *(grad_output.data_ptr(), input.data_ptr(), *first),
            None if index is None else index.data_ptr(),
            None if weight is None else weight.data_ptr(),
            0 if index is None else index.numel(),
            None if mean is None else mean.data_ptr(),
            None if sums is None else sums.data_ptr(),
            *(*last, result.data_ptr()),
        )
        return result

    return multiply


def _like_nonzeros(maps: Tensor) -> Tensor:
    return maps.new_empty(2, dtype=torch.int64)


@operator(like=_like_nonzeros, tensors=1)
def nonzeros(maps: Tensor, every: int) -> Callable[[Tensor], Tensor]:
    """Count the numbers that are not zero, and those that were looked at: (2,) int64.

    Args:
        maps: (N, C, H, W), contiguous or channels_last.
        every: 1 looks at all numbers, n at every n-th block of 4096 that lie side by side.
    """
    check_operands(maps=maps)
    if every < 1:
        raise ValueError(f"every={every} must be at least 1.")
    run, form = kernel("fst_count_nonzeros"), (KINDS[maps.dtype], maps.numel(), every)

    def count(maps: Tensor) -> Tensor:
        result = torch.empty(2, dtype=torch.int64)
        run(maps.data_ptr(), *form, result.data_ptr())
        return result

    return count


def _product(
    source: Tensor, weight: Tensor, backward: bool, like: Tensor, numbers: Numbers
) -> Callable[..., Tensor]:
    """A product of ``source`` and ``weight``, of the form of ``like``; only forms count."""
    layouts = (is_channels_last(source), is_channels_last(weight), is_channels_last(like))
    run, last = kernel("fst_maps_product"), (*numbers, integers(*layouts))
    kind, shape, strides = KINDS[source.dtype], like.shape, like.stride()
    is_empty, is_all_bias = not like.numel(), not source.numel()

    def multiply(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=source.dtype)
        if is_empty:
            return result
        if is_all_bias:
            return result.zero_() if bias is None else result.copy_(bias.view(1, -1, 1, 1))
        run(
            *(source.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(kind, backward, *last, result.data_ptr()),
        )
        return result

    return multiply


def _numbers(input_size: Sequence[int], weight_shape: Sequence[int], geometry: Geometry) -> Numbers:
    """Return the numbers that kernels take of shapes, see `convolution`."""
    numbers, channels = convolution(input_size, weight_shape, geometry)
    samples, height, width, *_ = numbers
    if max(weight_shape[2:]) > MOST_TAPS:
        raise ValueError(f"weight {tuple(weight_shape)}: at most {MOST_TAPS} taps along an axis.")
    if max(samples * height * width, math.prod(weight_shape)) > MOST_POSITIONS:
        raise ValueError(
            f"input {tuple(input_size)} and weight {tuple(weight_shape)}: at most {MOST_POSITIONS} "
            "places of a map and weights."
        )
    return integers(*numbers), *channels
