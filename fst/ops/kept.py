"""Which output positions grad_weight keeps, and what of the input they see."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import Geometry
from fst.rules.rule import Lattice, Rule, Signs


class KeptPositions(NamedTuple):
    """What grad_weight must know of a call, besides its tensors.

    Attributes:
        phase: which of the rule's positions are kept.
        lattices: those positions.
        geometry: of the convolution.
        input_size: rows and columns of the whole input.
        reduced: whether the saved inputs are those of the kept positions alone (1x1 kernels).
    """

    rule: Rule
    phase: int
    lattices: tuple[Lattice, ...]
    geometry: Geometry
    input_size: tuple[int, int]
    reduced: bool


def steps(lattice: Lattice, geometry: Geometry) -> tuple[int, int]:
    """Rows and columns of the input from one kept position to the next."""
    return geometry.stride[0] * lattice.row_step, geometry.stride[1] * lattice.column_step


def window_start(lattice: Lattice, geometry: Geometry) -> Lattice:
    """Where in the input the window of each kept position begins; in the padding below 0."""
    rows, columns = steps(lattice, geometry)
    return Lattice(
        lattice.row * geometry.stride[0] - geometry.padding[0],
        rows,
        lattice.column * geometry.stride[1] - geometry.padding[1],
        columns,
    )


class View(NamedTuple):
    """Some rows of a lattice, the image that they see, and the convolution that reads it."""

    rows: slice
    image: Tensor
    geometry: Geometry


def read(
    input: Tensor,
    kept: KeptPositions,
    index: int,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
    *,
    in_pieces: bool = False,
) -> list[View]:
    """What the positions of a lattice see of the input.

    ``in_pieces``: rather two pieces than a copy of the image, where only the last windows reach
    beyond its lower edge.
    """
    lattice, geometry = kept.lattices[index], kept.geometry
    input, signs = lattice.samples(input), kept.rule.input_signs(kept.phase)
    strided = geometry._replace(stride=steps(lattice, geometry))
    windows = functools.partial(
        _windows, input, output_size=output_size, kernel=kernel, strided=strided, geometry=geometry
    )
    if signs:
        block = (len(signs[index]), len(signs[index][0]))
        whole, strided = windows(lattice, block=block)
        return [View(slice(None), _filtered(whole, signs[index], geometry.stride), strided)]
    begins_at_edge = lattice.row and lattice.row * geometry.stride[0] == geometry.padding[0]
    if in_pieces and begins_at_edge and lattice.column == 0:
        reach = geometry.dilation[0] * (kernel[0] - 1) + 1
        inside = max(0, (input.shape[2] - reach) // strided.stride[0] + 1)
        if 0 < inside < lattice.size(*output_size)[0]:
            rest = lattice._replace(row=lattice.row + inside * lattice.row_step)
            padding = (0, geometry.padding[1])
            return [
                View(slice(0, inside), input, strided._replace(padding=padding)),
                View(slice(inside, None), *windows(rest)),
            ]
    return [View(slice(None), *windows(lattice))]


def _windows(
    input: Tensor,
    lattice: Lattice,
    *,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
    strided: Geometry,
    geometry: Geometry,
    block: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Geometry]:
    """The part of the padded input that the lattice's positions see, each a block of windows.

    Along an axis where the first window is the convolution's first, its padding stays.
    """
    padding = list(geometry.padding)
    edges: list[int] = []
    starts = ((lattice.row, lattice.row_step), (lattice.column, lattice.column_step))
    for axis, (start, step) in enumerate(starts):
        stride, pad = geometry.stride[axis], padding[axis]
        outside = (0, 0)
        if start or block[axis] > 1:
            padding[axis] = 0
            last = start + (output_size[axis] - 1 - start) // step * step
            begin = start * stride - pad
            reach = geometry.dilation[axis] * (kernel[axis] - 1) + (block[axis] - 1) * stride
            input, outside = _cut(input, 2 + axis, begin, last * stride - pad + reach + 1)
        edges = [*outside, *edges]
    if any(edges):
        input = F.pad(input, edges)
    return input, strided._replace(padding=(padding[0], padding[1]))


def _cut(input: Tensor, axis: int, begin: int, end: int) -> tuple[Tensor, tuple[int, int]]:
    """``input`` from ``begin`` to ``end``, which may lie outside: then zeros are to be padded."""
    size = input.shape[axis]
    first, last = min(max(begin, 0), size), min(max(end, 0), size)
    if last <= first:  # wholly in the padding
        return input.narrow(axis, 0, 0), (0, max(end - begin, 0))
    return input.narrow(axis, first, last - first), (first - begin, end - last)


def _filtered(windows: Tensor, signs: Signs, stride: tuple[int, int]) -> Tensor:
    """Σ ±X over a block of windows, which are ``stride`` apart."""
    rows = windows.shape[2] - (len(signs) - 1) * stride[0]
    columns = windows.shape[3] - (len(signs[0]) - 1) * stride[1]
    total: Tensor | None = None
    for i, line in enumerate(signs):
        strip = windows.narrow(2, i * stride[0], rows)
        for j, sign in enumerate(line):
            part = strip.narrow(3, j * stride[1], columns)
            if total is None:  # the first sign is always +
                total = part.clone(memory_format=torch.preserve_format)
            else:
                total = total.add_(part, alpha=sign)
    return total
