"""dW and dX over a list of positions, by gathering rows and multiplying: on any device.

Maps are read as matrices: a row for each position or pixel, in the order of (N, H, W). The image is
padded once, so that every tap of every position has a pixel, a fixed number of rows away from that
of the first tap.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends.registry import NO_GAIN, register_backend
from fst.ops.backends.lists import ByList, ByLists
from fst.ops.backends.lists_cpp import LISTS_CPP
from fst.ops.geometry import Geometry, is_channels_last, output_shape, share_of_mean
from fst.ops.operands import DrawnGradInput, FixedGradWeight, Operands
from fst.ops.positions.draw import Listed


class ListsByTorch(ByLists):
    """Gathers and multiplies."""

    name = "torch"

    def refuses(self, operands: Operands) -> str:
        drawn = not isinstance(operands, FixedGradWeight)
        if drawn and not LISTS_CPP.reason_against(operands):
            return f"{NO_GAIN}the C++ kernels compute the same"
        return super().refuses(operands)

    def cost(self, operands: Operands) -> float:
        return super().cost(operands) * 2

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> ByList:
        like = torch.empty_strided(weight.shape, weight.stride(), device="meta")
        return lambda grad_output, input, listed: _grad_weight(
            grad_output, input, like, listed, geometry
        )

    def list_grad_input(self, operands: DrawnGradInput, listed: Listed) -> ByList:
        where = (operands.input_shape, operands.geometry)
        return lambda grad_output, weight, listed: _grad_input(grad_output, weight, listed, *where)


def _grad_weight(
    grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
) -> Tensor:
    """Σ_j scale_j · dY[source_j] · (X − mean)[window of places_j]ᵀ + sums · meanᵀ: (Cout, Cin/g,
    kh, kw).

    Args:
        grad_output: (N, Cout, P', Q'), whose positions ``source`` counts.
        input: (N, Cin, H, W).
        weight: only its shape and memory format count.
    """
    places, scale, mean, sums, source = listed
    groups, (outputs, channels, *kernel) = geometry.groups, weight.shape
    grads = _rows(grad_output)[places if source is None else source]
    if scale is not None:
        grads = grads * scale[:, None].to(grads.dtype)
    grads = grads.unflatten(1, (groups, outputs // groups)).permute(1, 2, 0)  # (g, Cout/g, n)
    if mean is not None:
        input = input - mean[:, None, None].to(input.dtype)
    top, left = geometry.padding
    image = F.pad(input, (left, left, top, top)) if top or left else input
    size = (image.shape[2], image.shape[3])
    corner = _corner(places, input.shape, weight.shape, size, geometry)
    pixels = _rows(image)
    total = grad_output.new_empty(kernel[0], kernel[1], groups, outputs // groups, channels)
    for row, column, offset in _taps((kernel[0], kernel[1]), size, geometry):
        seen = pixels[corner + offset].unflatten(1, (groups, channels)).transpose(0, 1)
        total[row, column] = grads @ seen
    result = torch.empty_like(weight, dtype=grad_output.dtype, device=grad_output.device)
    result.copy_(total.flatten(2, 3).permute(2, 3, 0, 1))
    if mean is not None and sums is not None:
        result += share_of_mean(sums, mean, groups).to(result.dtype)
    return result


def _grad_input(
    grad_output: Tensor, weight: Tensor, listed: Listed, input_shape: torch.Size, geometry: Geometry
) -> Tensor:
    """Σ_j scale_j · Wᵀ dY[places_j], added at the taps of position j: (N, Cin, H, W).

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw).
    """
    places, scale = listed[:2]
    assert scale is not None
    groups, (outputs, channels, *kernel) = geometry.groups, weight.shape
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    grads = _rows(grad_output)[places] * scale[:, None].to(grad_output.dtype)
    grads = grads.unflatten(1, (groups, outputs // groups)).transpose(0, 1)  # (g, n, Cout/g)
    batch, _, height, width = input_shape
    top, left = geometry.padding
    size = (height + 2 * top, width + 2 * left)
    corner = _corner(places, input_shape, weight.shape, size, geometry)
    pixels = grads.new_zeros(batch * size[0] * size[1], groups * channels, dtype=wide)
    by_tap = weight.unflatten(0, (groups, outputs // groups))
    for row, column, offset in _taps((kernel[0], kernel[1]), size, geometry):
        added = grads @ by_tap[..., row, column]  # (g, n, Cin/g)
        pixels.index_add_(0, corner + offset, added.transpose(0, 1).flatten(1).to(wide))
    image = pixels.view(batch, *size, -1)[:, top : top + height, left : left + width]
    format = torch.channels_last if is_channels_last(grad_output) else torch.contiguous_format
    image = image.permute(0, 3, 1, 2).to(grad_output.dtype)
    return image.contiguous(memory_format=format)


def _rows(maps: Tensor) -> Tensor:
    """(N, C, H, W) as (N·H·W, C): a view where the channels lie side by side."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)


def _corner(
    places: Tensor,
    input_shape: torch.Size,
    weight_shape: tuple[int, ...],
    size: tuple[int, int],
    geometry: Geometry,
) -> Tensor:
    """Which row of the padded image's pixels the first tap of each position reads."""
    rows, columns = output_shape(input_shape, weight_shape, geometry)[2:]
    place = places.to(torch.int64)
    sample = place // (rows * columns)
    row, column = place // columns % rows, place % columns
    line = sample * size[0] + row * geometry.stride[0]
    return line * size[1] + column * geometry.stride[1]


def _taps(
    kernel: tuple[int, int], size: tuple[int, int], geometry: Geometry
) -> Iterator[tuple[int, int, int]]:
    """Row, column and distance from the first tap, in pixels of the padded image."""
    down, right = geometry.dilation
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            yield row, column, row * down * size[1] + column * right


register_backend(ListsByTorch())
