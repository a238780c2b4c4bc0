"""Gradients over lists of positions, by the C++ kernels for CPUs.

A list names output positions i = (n·P + p)·Q + q of a convolution, int32 and ascending, each with a
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fst.backends.registry import register_backend
from fst.ops import cpp
from fst.ops.backends.lists import ByList, ByLists
from fst.ops.geometry import (
    Geometry,
    geometry_of,
    is_channels_last,
    positions_of,
    share_of_mean,
)
from fst.ops.operands import DrawnGradInput, FixedGradWeight, GradWeight, Operands
from fst.ops.positions.draw import Listed

FEW_CHANNELS = 8  # of the input, below which the kernel's tiles are mostly empty


@cpp.operator(like=cpp.like_grad_weight, tensors=7)
def list_grad_weight(
    grad_output: Tensor,
    input: Tensor,
    index: Tensor,
    weight: Tensor | None,
    source: Tensor | None,
    mean: Tensor | None,
    sums: Tensor | None,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
) -> Callable[..., Tensor]:
    """The weight gradient over a list: Σ_j weight_j · dY[source_j] · (X − mean)[window j]ᵀ, and
    sums · meanᵀ for each tap.

    Args:
        grad_output: (N', Cout, P', Q').
        input: (N, Cin, H, W).
        index: (n,) int32, positions of the convolution's output map, ascending.
        weight: (n,) float32; None: 1 everywhere.
        source: (n,) int32, rows of grad_output, whose map may be another; None: ``index``.
        mean: (Cin,) float32, subtracted from the input inside the image; None: nothing is.
        sums: (Cout, kh, kw) float32, which ``mean`` is multiplied by; None: nothing is added.
        weight_shape: (Cout, Cin/groups, kh, kw).
        channels_last: the memory format of the result.

    Returns:
        dW of ``weight_shape``, in the dtype of grad_output.
    """
    cpp.check_operands(grad_output=grad_output, input=input)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers, channels = cpp.convolution(input.shape, weight_shape, geometry)
    samples, _, _, height, width, *_ = numbers
    out = weight_shape[0]
    cpp.check_list(index, weight, samples * height * width)
    cpp.check_plain(torch.float32, (input.shape[1],), mean=mean)
    cpp.check_plain(torch.float32, (out, *weight_shape[2:]), sums=sums)
    rows, places = positions_of(grad_output), math.prod(grad_output.shape[2:])
    if source is None:
        cpp.check_map(grad_output, input.shape, weight_shape, geometry)
    elif grad_output.shape[1] != out:
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have {out} channels.")
    else:
        cpp.check_plain(torch.int32, (index.numel(),), source=source)
        low, high = torch.aminmax(source) if source.numel() else (0, rows - 1)
        if low < 0 or high >= rows:
            raise ValueError(f"source from {low} to {high} must be rows of dY, 0 to {rows}.")
    like = cpp.like_grad_weight(grad_output, weight_shape, channels_last)
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(like))
    run, kind = cpp.kernel("fst_list_grad_weight"), cpp.KINDS[input.dtype]
    last = cpp.integers(*numbers), *channels, cpp.integers(*layouts)
    shape, strides = like.shape, like.stride()

    def multiply(
        grad_output: Tensor,
        input: Tensor,
        index: Tensor,
        weight: Tensor | None,
        source: Tensor | None,
        mean: Tensor | None,
        sums: Tensor | None,
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if not index.numel() or not result.numel():
            if mean is None or sums is None:
                return result.zero_()
            return result.copy_(share_of_mean(sums, mean, groups))
        if weight is None:
            weight = torch.ones(index.numel(), dtype=torch.float32)
        run(
            *(grad_output.data_ptr(), input.data_ptr(), kind, index.data_ptr(), weight.data_ptr()),
            *(None if source is None else source.data_ptr(), index.numel(), places, rows),
            None if mean is None else mean.data_ptr(),
            None if mean is None or sums is None else sums.data_ptr(),
            *(*last, result.data_ptr()),
        )
        return result

    return multiply


@cpp.operator(like=cpp.like_grad_input, tensors=4)
def list_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    index: Tensor,
    list_weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The input gradient from a list: Σ_j list_weight_j · Wᵀ dY[index_j], added at the taps.

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw).
        index: (n,) int32, positions of grad_output, ascending.
        list_weight: (n,) float32.
        input_size: (N, Cin, H, W).

    Returns:
        dX of ``input_size``, in the dtype and memory format of grad_output.
    """
    cpp.check_operands(grad_output=grad_output, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers, channels = cpp.convolution(input_size, weight.shape, geometry)
    cpp.check_map(grad_output, input_size, weight.shape, geometry)
    cpp.check_list(index, list_weight, positions_of(grad_output))
    like = cpp.like_grad_input(grad_output, input_size)
    run, kind = cpp.kernel("fst_list_grad_input"), cpp.KINDS[weight.dtype]
    layouts = (is_channels_last(grad_output), is_channels_last(weight))
    given, last = cpp.integers(*numbers), (*channels, cpp.integers(*layouts))
    shape, strides = like.shape, like.stride()

    def multiply(grad_output: Tensor, weight: Tensor, index: Tensor, list_weight: Tensor) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if not index.numel() or not result.numel():
            return result.zero_()
        run(
            *(grad_output.data_ptr(), weight.data_ptr(), kind, index.data_ptr()),
            *(list_weight.data_ptr(), index.numel(), given, *last, result.data_ptr()),
        )
        return result

    return multiply


class ListsByCpp(ByLists):
    """Outer products at the listed positions."""

    name = cpp.BACKEND

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Operands) -> str:
        other = operands.input if isinstance(operands, GradWeight) else operands.weight  # type: ignore[attr-defined]
        reason = cpp.refuses(operands.grad_output, other)  # type: ignore[attr-defined]
        return reason or super().refuses(operands)

    def cost(self, operands: Operands) -> float:
        if isinstance(operands, FixedGradWeight) and operands.weight.shape[1] < FEW_CHANNELS:
            return 2.0
        return super().cost(operands) / 2

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> ByList:
        if cpp.refuses(grad_output):  # sums of some positions, which lie apart
            last = torch.channels_last
            multiply = self.list_grad_weight(
                grad_output.contiguous(memory_format=last), input, weight, listed, geometry
            )
            return lambda sums, input, listed: multiply(
                sums.contiguous(memory_format=last), input, listed
            )
        wanted = (weight.shape, *geometry, is_channels_last(weight))
        places, scale, mean, sums, source = listed
        maps = grad_output, input
        planned = list_grad_weight.plan(*maps, places, scale, source, mean, sums, *wanted)
        return lambda grad_output, input, of: planned(
            grad_output, input, of.places, of.scale, of.source, of.mean, of.sums
        )

    def list_grad_input(self, operands: DrawnGradInput, listed: Listed) -> ByList:
        wanted = (operands.input_shape, *operands.geometry)
        maps = (operands.grad_output, operands.weight)
        planned = list_grad_input.plan(*maps, *listed[:2], *wanted)
        return lambda grad_output, weight, listed: planned(grad_output, weight, *listed[:2])


LISTS_CPP = register_backend(ListsByCpp())
