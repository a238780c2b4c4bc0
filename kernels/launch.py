"""Shared by the launches of all kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

WARPS = 4
LANES = 32 * WARPS
INT32 = 2**31


class Launch(NamedTuple):
    """Grid, positional arguments and constants of one kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch on the current stream of the current device."""
        self.kernel[self.grid](*self.arguments, **self.constants)

    def on_others(self, count: int) -> Callable[..., None]:
        """The launch as a function of its first ``count`` arguments, none of which it keeps."""
        start, rest, constants = self.kernel[self.grid], self.arguments[count:], self.constants
        return lambda *tensors: start(*tensors, *rest, **constants)


class Layout(NamedTuple):
    """A 4-D tensor as (samples, channels, positions), with the strides of each axis."""

    samples: int
    channels: int
    positions: int
    sample: int
    channel: int
    position: int


class Tile(NamedTuple):
    """The tile of a tensor that a program covers; see `prune_triton.load_runs`."""

    rows: int
    columns: int
    log: int
    channel_inner: bool
    flat: bool
    align: int

    def grid(self, layout: Layout, run: int, groups: int) -> tuple[int, int]:
        """Tiles along the positions of a sample, and along the channels."""
        runs = groups * triton.cdiv(layout.channels // groups, run)
        at_positions = self.rows if self.channel_inner else self.columns
        at_runs = self.columns if self.channel_inner else self.rows
        return triton.cdiv(layout.positions, at_positions), triton.cdiv(runs, at_runs)

    def constants(self) -> dict[str, Any]:
        """As kernels take them."""
        return {
            "LOG": self.log,
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "CHANNEL_INNER": self.channel_inner,
            "FLAT": self.flat,
            "ALIGN": self.align,
            "num_warps": WARPS,
        }


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of (N, C, P, Q), or None where rows of positions do not follow each other."""
    return strided_layout(tensor.shape, tensor.stride())


def strided_layout(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """`layout_of` a tensor of these sizes and strides."""
    samples, channels, height, width = shape
    sample, channel, row, column = strides
    if width == 1:
        column = row
    elif height > 1 and row != width * column:
        return None
    return Layout(samples, channels, height * width, sample, channel, column)


def collapse(*layouts: Layout) -> tuple[Layout, ...]:
    """All samples as one where every layout allows it and offsets fit 32 bits."""
    fits = all(last_offset(x[:3], x[3:]) < INT32 for x in layouts)
    if not fits or any(x.sample != x.positions * x.position for x in layouts):
        return layouts
    return tuple(
        x._replace(samples=1, positions=x.samples * x.positions, sample=0) for x in layouts
    )


def last_offset(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Offset of the last element of a tensor, in elements."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def within_32_bits(tensor: Tensor) -> Tensor:
    """The tensor (N, ...), or a dense copy where offsets within a sample do not fit 32 bits.

    Raises:
        ValueError: a sample has more than 2**31 elements.
    """
    if last_offset(tensor.shape[1:], tensor.stride()[1:]) < INT32:
        return tensor
    if tensor.shape[1:].numel() > INT32:
        raise ValueError(f"tensor has shape {tuple(tensor.shape)}: more than 2**31 in a sample.")
    return tensor.contiguous()


def power_of_2(limit: int) -> int:
    """The largest power of two up to ``limit``, at least 1."""
    return 1 << max(0, limit.bit_length() - 1)


def tile_of(layout: Layout, out: Layout, run: int, groups: int, itemsize: int) -> Tile:
    """Tiles of a few 16-byte vectors for each thread; ``run`` channels stay in one thread."""
    vector = 16 // itemsize
    inner = layout.channel == 1 and out.channel == 1 and layout.channels > 1
    if inner or layout.position != 1:
        power = run & (run - 1) == 0
        flat = inner and power and layout.channels // groups % run == 0
        flat = flat and layout.position % vector == 0 and out.position % vector == 0
        runs = groups * triton.cdiv(layout.channels // groups, run)
        columns = min(triton.next_power_of_2(runs), 16)
        rows = max(1, LANES * power_of_2(2 * vector // run) // columns)
        return Tile(rows, columns, run.bit_length() - 1 if flat else 0, True, flat, 1)
    sizes = (layout.positions, layout.channel, layout.sample, out.channel, out.sample)
    align = next(a for a in (vector, vector // 2, 2, 1) if all(x % a == 0 for x in sizes))
    per_thread = power_of_2(min(align, 32 // run))
    columns = min(triton.next_power_of_2(layout.positions), LANES * per_thread)
    return Tile(LANES * per_thread // columns, columns, 0, False, False, align)
