"""Dense weight gradients of convolutions with a large stride: several programs, one result.

The library's kernel is the default, and on other devices than CPUs until something else is
measured there. On a CPU, in float32, what is faster depends on oneDNN's kernel, so on the
instructions that it has. With AVX2 alone one matrix product with the columns that are needed is
faster from 64 channels on. With AVX-512 it is on small maps with many channels; elsewhere the
kernel loses efficiency when a stride of 1 becomes a horizontal stride of 2, so the image is
transposed first. Little work is left to one call of the library. Kernels of 1x1, and so linear
layers, need no columns: there the maps are matrices whose rows lie a constant step apart, which the
library's product reads in place. Compiled code has the library's kernel, transposed or not. `fst
bench` shows what each shape gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import Geometry, gradients

MANY_OUTPUTS = 512  # channels from which on the matrix product is the default
MANY_CHANNELS = 64  # of the input, from which on it is with AVX2
LITTLE_WORK = 2**23  # multiply-adds of the dense gradient
MOST_COLUMNS = 2**22  # elements of the columns that exist at a time, 16 MiB in float32
ONLY_WEIGHT = (False, True, False)


def program(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> str:
    """Which program is the default: "strided", "transposed", "gemm" or "product"."""
    kernel = (weight.shape[2], weight.shape[3])
    on_cpu = grad_output.device.type == "cpu"
    if on_cpu and _is_product(grad_output, weight, geometry):
        return "product"
    on_cpu = on_cpu and grad_output.dtype == torch.float32
    if not on_cpu or geometry.groups > 1 or kernel == (1, 1):
        return "strided"
    if not torch.compiler.is_compiling():  # there sizes may be symbols, which a choice would pin
        if grad_output.numel() * math.prod(weight.shape[1:]) < LITTLE_WORK:
            return "strided"
        if weight.shape[0] >= MANY_OUTPUTS:
            return "gemm"
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            return "gemm" if weight.shape[1] >= MANY_CHANNELS else "strided"
    return "transposed" if geometry.stride == (1, 2) and kernel[1] > 1 else "strided"


def programs(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> tuple[str, ...]:
    """The programs that can compute dW from a folded ``grad_output``, the default first.

    ``geometry`` is that of the strided gradient.
    """
    default = program(grad_output, weight, geometry)
    if weight.shape[2:] == (1, 1):
        return ("product", "strided") if default == "product" else (default,)
    others = (name for name in ("strided", "transposed", "gemm") if name != default)
    return (default, *(n for n in others if n != "gemm" or geometry.groups == 1))


def _is_product(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether dW is one product of matrices, whose rows are positions in NHWC memory."""
    return weight.shape[2:] == (1, 1) and geometry.groups == 1 and grad_output.stride(1) == 1


class Piece(NamedTuple):
    """A share of the kept positions: their grad_output, the image they see, and how.

    Attributes:
        start: row and column of the padded image where the first window begins; "gemm" alone
            reads it.
    """

    grad_output: Tensor
    image: Tensor
    geometry: Geometry
    start: tuple[int, int] = (0, 0)


def _strided(pieces: list[Piece], weight: Tensor) -> Tensor:
    parts = [gradients(p.grad_output, p.image, weight, p.geometry, ONLY_WEIGHT)[1] for p in pieces]
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def _transposed(pieces: list[Piece], weight: Tensor) -> Tensor:
    stand_in = weight.new_empty(weight.shape[0], weight.shape[1], *weight.shape[:1:-1])
    turned = [
        Piece(
            p.grad_output.transpose(2, 3).contiguous(memory_format=torch.channels_last),
            p.image.transpose(2, 3).contiguous(memory_format=torch.channels_last),
            Geometry(*(pair[::-1] for pair in p.geometry[:3]), p.geometry.groups),
        )
        for p in pieces
    ]
    return _strided(turned, stand_in).transpose(2, 3)


def _gemm(pieces: list[Piece], weight: Tensor) -> Tensor:
    """Products with the columns that the positions see, as many samples at a time as fit.

    Pieces of one image have one padding: it is padded once.
    """
    outputs, channels, height, width = weight.shape
    length = height * width * channels
    positions = sum(math.prod(p.grad_output.shape[2:]) for p in pieces)
    samples = max(1, MOST_COLUMNS // (length * positions))
    total: Tensor | None = None
    for first in range(0, max(len(p.image) for p in pieces), samples):
        few = slice(first, first + samples)
        lines = [p.grad_output[few].permute(0, 2, 3, 1) for p in pieces]
        counts = [math.prod(part.shape[:3]) for part in lines]
        grads = lines[0].new_empty(sum(counts), outputs)
        columns = lines[0].new_empty(sum(counts), length)
        image: Tensor | None = None
        places = zip(pieces, lines, grads.split(counts), columns.split(counts), strict=True)
        for piece, part, its_grads, its_columns in places:
            if piece.image is not image:
                image = piece.image
                padded = _padded(image[few], piece.geometry.padding)
            patches = _patches(padded, piece, part.shape, (height, width))
            its_grads.view(part.shape).copy_(part)
            its_columns.view(patches.shape).copy_(patches)
        total = grads.t() @ columns if total is None else total.addmm_(grads.t(), columns)
    return total.view(outputs, height, width, channels).permute(0, 3, 1, 2)


def _padded(image: Tensor, padding: tuple[int, int]) -> Tensor:
    """(N, C, H, W) as (N, H', W', C) with adjacent channels, and with zeros around."""
    image, (top, left) = image.permute(0, 2, 3, 1), padding
    if not (top or left) and image.stride(3) == 1:
        return image
    batch, height, width, channels = image.shape
    padded = image.new_zeros(batch, height + 2 * top, width + 2 * left, channels)
    padded[:, top : top + height, left : left + width] = image
    return padded


def _patches(
    padded: Tensor, piece: Piece, positions: torch.Size, kernel: tuple[int, int]
) -> Tensor:
    """The view (N, P, Q, kh, kw, C) of what each position sees."""
    (rows, columns), _, (row_gap, column_gap), _ = piece.geometry
    windows = padded[:, piece.start[0] :, piece.start[1] :]
    sample, line, pixel, _ = windows.stride()
    return windows.as_strided(
        (*positions[:3], *kernel, windows.shape[3]),
        (sample, rows * line, columns * pixel, row_gap * line, column_gap * pixel, 1),
    )


def _product(pieces: list[Piece], weight: Tensor) -> Tensor:
    total: Tensor | None = None
    for piece in pieces:
        (rows, columns), (top, left), _, _ = piece.geometry
        image = F.pad(piece.image, (left, left, top, top)) if top or left else piece.image
        height, width = piece.grad_output.shape[2:]
        seen = _matrix(image[:, :, ::rows, ::columns][:, :, :height, :width])
        grads = _matrix(piece.grad_output).t()
        total = grads @ seen if total is None else torch.addmm(total, grads, seen)
    return total[:, :, None, None]


def _matrix(maps: Tensor) -> Tensor:
    """(N, C, P, Q) as (N·P·Q, C): a view where one step leads from each row to the next."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)


PROGRAMS: dict[str, Callable[[list[Piece], Tensor], Tensor]] = {
    "strided": _strided,
    "transposed": _transposed,
    "gemm": _gemm,
    "product": _product,
}
