"""Shapes of a convolution, and the dense kernels of its three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ONLY_WEIGHT = (False, True, False)  # what `gradients` is asked for


class Geometry(NamedTuple):
    """Stride, symmetric padding, dilation (height, width) and groups of a 2-D convolution."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def geometry_of(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    """The geometry whose pairs a registered operator got as lists.

    Raises:
        ValueError: one of them has not two numbers.
    """
    return Geometry(
        pair_of("stride", stride),
        pair_of("padding", padding),
        pair_of("dilation", dilation),
        groups,
    )


def pair_of(name: str, numbers: Sequence[int]) -> tuple[int, int]:
    """The numbers, of which there must be two."""
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


def matrix_of(maps: Tensor) -> Tensor | None:
    """(N, C, 1, L) as the matrix (N·L, C), a view; None where values would have to move."""
    pixel = maps.shape[2] == maps.shape[3] == 1 and maps.is_contiguous()
    if pixel or maps.is_contiguous(memory_format=torch.channels_last):
        return maps.permute(0, 2, 3, 1).flatten(0, 2)
    return None


def _are_matrices(maps: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """True for products that are those of a linear layer on (N, C) or (N, L, C), on a CPU.

    PyTorch computes its linear layers by matrix products. In float32 they are up to seven times as
    fast as a convolution of maps that are one pixel, and no slower on rows of tokens.
    """
    if maps.shape[2] != 1 or weight.shape[2:] != (1, 1) or maps.device.type != "cpu":
        return False
    stride, padding, _, groups = geometry
    once = stride == (1, 1) and padding == (0, 0) and groups == 1
    return once and maps.dtype in (torch.float32, torch.float64)


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The output GEMM: (N, Cin, H, W) -> (N, Cout, P, Q)."""
    rows = matrix_of(input) if _are_matrices(input, weight, geometry) else None
    if rows is None:
        return F.conv2d(input, weight, bias, *geometry)
    return _multiply(rows, weight.flatten(1).t(), bias, input)


def _multiply(rows: Tensor, factor: Tensor, bias: Tensor | None, maps: Tensor) -> Tensor:
    """rows @ factor + bias as maps like ``maps``; no view, which nobody could change in place."""
    product = empty_maps((maps.shape[0], factor.shape[1], *maps.shape[2:]), maps, True)
    out = product.permute(0, 2, 3, 1).flatten(0, 2)
    if bias is None:
        torch.mm(rows, factor, out=out)
    else:
        torch.addmm(bias, rows, factor, out=out)
    return product


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_input (uses ``weight``), grad_weight (uses ``input``), grad_bias, as far as needed."""
    if _are_matrices(input, weight, geometry):
        above, below = matrix_of(grad_output), matrix_of(input)
        if above is not None and below is not None:
            return (
                _multiply(above, weight.flatten(1), None, input) if needed[0] else None,
                (above.t() @ below).view(weight.shape) if needed[1] else None,
                above.sum(0) if needed[2] else None,
            )
    stride, padding, dilation, groups = geometry
    return torch.ops.aten.convolution_backward.default(
        grad_output,
        input,
        weight,
        [weight.shape[0]],
        list(stride),
        list(padding),
        list(dilation),
        False,
        [0, 0],
        groups,
        list(needed),
    )


def input_gradient(
    grad_output: Tensor, weight: Tensor, geometry: Geometry, input_shape: torch.Size
) -> Tensor:
    """grad_input alone, for which the input itself is not needed."""
    if _are_matrices(grad_output, weight, geometry):
        above = matrix_of(grad_output)
        if above is not None:
            return _multiply(above, weight.flatten(1), None, grad_output)
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
    return F.conv_transpose2d(grad_output, weight, None, stride, padding, rest, groups, dilation)
