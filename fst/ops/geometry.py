"""Shapes of a convolution, and the dense kernels of its three GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_GRADIENTS = torch.ops.aten.convolution_backward.default
ONLY_WEIGHT = (False, True, False)  # of the three `gradients`


class Geometry(NamedTuple):
    """Stride, symmetric padding, dilation (height, width) and groups of a 2-D convolution."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def is_linear(self) -> bool:
        """True where the convolution stands for a linear layer."""
        return False

    @property
    def form(self) -> tuple[Any, ...]:
        """Numbers on which times depend. The last one tells linear layers from 1x1 kernels."""
        return *self, self.is_linear


class LinearGeometry(Geometry):
    """Of a linear layer as a 1x1 convolution: its dense products are matrix products."""

    @property
    def is_linear(self) -> bool:
        return True


LINEAR = LinearGeometry((1, 1), (0, 0), (1, 1), 1)


def geometry_of(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    """The geometry whose pairs a registered operator got as lists.

    Raises:
        ValueError: one of them has not two numbers, or a stride is below 1.
    """
    strides = pair_of("stride", stride)
    if min(strides) < 1:
        raise ValueError(f"stride={strides} must be two numbers from 1.")
    return Geometry(
        strides,
        pair_of("padding", padding),
        pair_of("dilation", dilation),
        groups,
    )


def pair_of(name: str, numbers: Sequence[int]) -> tuple[int, int]:
    """Two numbers; ValueError for any other count."""
    if len(numbers) != 2:
        raise ValueError(f"{name}={tuple(numbers)} must be two numbers.")
    return numbers[0], numbers[1]


def output_shape(
    input_shape: Sequence[int], weight_shape: Sequence[int], geometry: Geometry
) -> tuple[int, int, int, int]:
    """(N, Cout, P, Q) of a convolution."""
    sizes = zip(
        input_shape[2:],
        weight_shape[2:],
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        strict=True,
    )
    rows, columns = ((x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d in sizes)
    return input_shape[0], weight_shape[0], rows, columns


def positions_of(maps: Tensor) -> int:
    """N·H·W of (N, C, H, W)."""
    return maps.shape[0] * maps.shape[2] * maps.shape[3]


def is_channels_last(maps: Tensor) -> bool:
    """True if the channels lie side by side, and no other order describes the tensor as well."""
    return maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous()


def empty_maps(shape: Sequence[int], like: Tensor, channels_last: bool) -> Tensor:
    """Uninitialised maps of the dtype and on the device of ``like``."""
    format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), memory_format=format, dtype=like.dtype, device=like.device)


def share_of_mean(sums: Tensor, mean: Tensor, groups: int) -> Tensor:
    """Return the part of dW (Cout, Cin/groups, kh, kw) from the mean of the input: sums · meanᵀ for
    each tap, of ``sums`` (Cout, kh, kw) of grad_output and ``mean`` (Cin,).
    """
    means = mean.view(groups, 1, -1, 1, 1)
    return (sums.unflatten(0, (groups, -1)).unsqueeze(2) * means).flatten(0, 1)


def _matrices(weight: Tensor, geometry: Geometry, *maps: Tensor) -> list[Tensor] | None:
    """Maps (N, C, H, W) as matrices (N·H·W, C), views, for the products of a linear layer.

    PyTorch computes linear layers by matrix products, which on a CPU are faster than a convolution
    of maps that are one pixel high. None for any other product, and where values would have to
    move.
    """
    if maps[0].device.type != "cpu" or weight.shape[2:] != (1, 1):
        return None
    if maps[0].shape[2] != 1 and not geometry.is_linear:
        return None
    stride, padding, _, groups = geometry
    if stride != (1, 1) or padding != (0, 0) or groups != 1:
        return None
    # In 16 bits the convolution is the faster one.
    if maps[0].dtype not in (torch.float32, torch.float64) or not all(map(_has_rows, maps)):
        return None
    return [_rows_of(of) for of in maps]


def _has_rows(maps: Tensor) -> bool:
    pixel = maps.shape[2] == maps.shape[3] == 1 and maps.is_contiguous()
    return pixel or maps.is_contiguous(memory_format=torch.channels_last)


def _rows_of(maps: Tensor) -> Tensor:
    return maps.permute(0, 2, 3, 1).flatten(0, 2)


def _multiply(rows: Tensor, factor: Tensor, bias: Tensor | None, maps: Tensor) -> Tensor:
    """rows @ factor + bias as maps like ``maps``: no view, which could not be changed in place."""
    product = empty_maps((maps.shape[0], factor.shape[1], *maps.shape[2:]), maps, True)
    if bias is None:
        torch.mm(rows, factor, out=_rows_of(product))
    else:
        torch.addmm(bias, rows, factor, out=_rows_of(product))
    return product


def convolve(
    input: Tensor, weight: Tensor, geometry: Geometry
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The output GEMM (N, Cin, H, W) -> (N, Cout, P, Q) of tensors of this form."""
    if _matrices(weight, geometry, input) is None:
        return _library(geometry)
    return lambda input, weight, bias: _multiply(
        _rows_of(input), weight.flatten(1).t(), bias, input
    )


def convolve_by_torch(
    input: Tensor, weight: Tensor, geometry: Geometry
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`convolve` by operators that PyTorch differentiates: by the same products as `gradients`."""
    if _matrices(weight, geometry, input) is None:
        return _library(geometry)

    def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = F.linear(_rows_of(input), weight.flatten(1), bias)
        samples, _, height, width = input.shape
        return rows.view(samples, height, width, -1).permute(0, 3, 1, 2)

    return multiply


def _library(geometry: Geometry) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    stride, padding, dilation, groups = geometry
    return lambda input, weight, bias: F.conv2d(
        input, weight, bias, stride, padding, dilation, groups
    )


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    needed: tuple[bool, bool, bool],
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """grad_input (uses ``weight``), grad_weight (uses ``input``), grad_bias, as far as needed, as
    a function of grad_output, input and weight of this form.
    """
    if _matrices(weight, geometry, grad_output, input) is not None:
        return functools.partial(_gradients_of_rows, needed)
    stride, padding, dilation, groups = geometry
    last = (weight.shape[0],), stride, padding, dilation, False, (0, 0), groups, needed
    return lambda grad_output, input, weight: _GRADIENTS(grad_output, input, weight, *last)


def _gradients_of_rows(
    needed: tuple[bool, bool, bool], grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    above, below = _rows_of(grad_output), _rows_of(input)
    return (
        _multiply(above, weight.flatten(1), None, input) if needed[0] else None,
        (above.t() @ below).view(weight.shape) if needed[1] else None,
        above.sum(0) if needed[2] else None,
    )


def input_gradient(
    grad_output: Tensor, weight: Tensor, geometry: Geometry, input_shape: torch.Size
) -> Callable[[Tensor, Tensor], Tensor]:
    """grad_input alone, for which the input itself is not needed."""
    if _matrices(weight, geometry, grad_output) is not None:
        return lambda grad_output, weight: _multiply(
            _rows_of(grad_output), weight.flatten(1), None, grad_output
        )
    stride, padding, dilation, groups = geometry
    rest = [
        size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, out, s, p, d, k in zip(
            input_shape[2:],
            grad_output.shape[2:],
            stride,
            padding,
            dilation,
            weight.shape[2:],
            strict=True,
        )
    ]
    return lambda grad_output, weight: F.conv_transpose2d(
        grad_output, weight, None, stride, padding, rest, groups, dilation
    )
