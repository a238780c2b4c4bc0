"""Which positions and taps each GEMM of a convolution multiplies, as numbers for `convolve.h`.

An output position of a lattice is (row + i·step, column + j·step); what it reads for a tap lies at
(i·step' + tap row, j·step' + tap column). The output GEMM is one lattice of all positions. In
grad_input, positions of different remainders by the stride see different taps: one lattice for
each remainder, every tap in one of them at most.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .layout import BLOCK

MOST_TAPS, MOST_LATTICES = 64, 16  # room in sparse24.h
MOST_SIDE = 8191  # a row and a column share 32 bits
CHANNELS = 8  # 16 bytes of an operand's channels are read at a time


class Tap(NamedTuple):
    """Where a position reads for a tap, and which of the packed taps it multiplies."""

    row: int
    column: int
    packed: int


class Lattice(NamedTuple):
    """Positions of the result that read the same taps."""

    row: int
    column: int
    rows: int
    columns: int
    taps: tuple[Tap, ...]


class Shape(NamedTuple):
    """A convolution: sizes of the input (N, Cin, H, W) and the output (N, Cout, P, Q)."""

    samples: int
    in_channels: int
    out_channels: int
    input: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def unsupported(shape: Shape) -> str:
    """Why a convolution cannot be computed by these kernels; "" if it can."""
    for name, channels in (("input", shape.in_channels), ("output", shape.out_channels)):
        if channels // shape.groups % CHANNELS:
            return (
                f"{channels // shape.groups} {name} channels of a group are no multiple of "
                f"{CHANNELS}"
            )
    if shape.kernel[0] * shape.kernel[1] > MOST_TAPS:
        return f"kernel {shape.kernel} has more than {MOST_TAPS} taps"
    if shape.stride[0] * shape.stride[1] > MOST_LATTICES:
        return f"stride {shape.stride} has more than {MOST_LATTICES} remainders"
    positions = (*shape.input, *shape.output)
    reach = (d * (k - 1) for d, k in zip(shape.dilation, shape.kernel, strict=True))
    if max(*positions, *shape.padding, *reach) > MOST_SIDE:
        return f"a side, padding or dilated kernel is larger than {MOST_SIDE}"
    if shape.samples * max(positions[0] * positions[1], positions[2] * positions[3]) >= 2**31:
        return "an image batch has 2**31 positions or more"
    return ""


def output_lattices(shape: Shape) -> tuple[Lattice, ...]:
    """All positions of the output; taps in the order of the weight's."""
    taps = (
        Tap(
            r * shape.dilation[0] - shape.padding[0],
            s * shape.dilation[1] - shape.padding[1],
            r * shape.kernel[1] + s,
        )
        for r in range(shape.kernel[0])
        for s in range(shape.kernel[1])
    )
    return (Lattice(0, 0, *shape.output, tuple(taps)),)


def grad_input_lattices(shape: Shape) -> tuple[Lattice, ...]:
    """Positions of the input by their remainders, those with most taps first."""
    last = shape.kernel[0] * shape.kernel[1] - 1
    lattices = []
    for row in range(min(shape.stride[0], shape.input[0])):
        for column in range(min(shape.stride[1], shape.input[1])):
            taps = tuple(
                Tap(down, across, last - (r * shape.kernel[1] + s))
                for r, down in _reads(shape, 0, row)
                for s, across in _reads(shape, 1, column)
            )
            rows = -(-(shape.input[0] - row) // shape.stride[0])
            columns = -(-(shape.input[1] - column) // shape.stride[1])
            lattices.append(Lattice(row, column, rows, columns, taps))
    return tuple(sorted(lattices, key=lambda lattice: -len(lattice.taps)))


def _reads(shape: Shape, axis: int, start: int) -> list[tuple[int, int]]:
    """(tap, offset into grad_output) of positions start, start + stride, ... along an axis."""
    stride, dilation = shape.stride[axis], shape.dilation[axis]
    offsets = (
        (tap, start + shape.padding[axis] - tap * dilation) for tap in range(shape.kernel[axis])
    )
    return [(tap, offset // stride) for tap, offset in offsets if offset % stride == 0]


@functools.lru_cache(maxsize=4096)
def numbers(shape: Shape, *, transposed: bool) -> tuple[int, ...]:
    """The members of ``struct Convolution`` in order.

    Raises:
        ValueError: see `unsupported`.
    """
    reason = unsupported(shape)
    if reason:
        raise ValueError(f"shape={tuple(shape)}: {reason}.")
    sizes = (shape.in_channels, *shape.input), (shape.out_channels, *shape.output)
    (read, *read_size), (written, *written_size) = reversed(sizes) if transposed else sizes
    lattices = grad_input_lattices(shape) if transposed else output_lattices(shape)
    depth, rows = read // shape.groups, written // shape.groups
    taps = [tap for lattice in lattices for tap in lattice.taps]
    head = (
        *(shape.samples, *read_size, read, *written_size, written),
        *(shape.groups, depth, rows, -(-rows // BLOCK), -(-depth // BLOCK)),
        *(shape.kernel[0] * shape.kernel[1], len(lattices)),
        *((1, 1) if transposed else shape.stride),
        *(shape.stride if transposed else (1, 1)),
    )
    table, first = [], 0
    for lattice in lattices:
        table += [*lattice[:4], first, len(lattice.taps)]
        first += len(lattice.taps)
    table += [0] * (6 * (MOST_LATTICES - len(lattices)))
    flat = [number for tap in taps for number in tap] + [0] * (3 * (MOST_TAPS - len(taps)))
    return (*head, *table, *flat)
