"""The positions of a lattice as a larger stride: a dense weight gradient of the library.

Over a lattice the sum  dW = Σ dY[kept] · X[kept]ᵀ  is the weight gradient of the same convolution
with the stride multiplied by the lattice's step. Half of the positions are half the work.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import ONLY_WEIGHT, Geometry, gradients
from fst.rules.rule import Lattice


def grad_weight(
    sums: Tensor,
    input: Tensor,
    weight: Tensor,
    lattice: Lattice,
    size: tuple[int, int],
    geometry: Geometry,
) -> Tensor:
    """dW (Cout, Cin/groups, kh, kw) over the positions of ``lattice``.

    Args:
        sums: (N, Cout, rows, columns) what is multiplied at these positions.
        size: of the whole output map.
        weight: only its shape and memory format count.
    """
    image, strided = windows(input, lattice, size, (weight.shape[2], weight.shape[3]), geometry)
    total = gradients(sums, image, weight, strided, ONLY_WEIGHT)[1]
    assert total is not None  # needed
    return total


def _steps(lattice: Lattice, geometry: Geometry) -> tuple[int, int]:
    """Rows and columns of the input from one kept position to the next."""
    return geometry.stride[0] * lattice.row_step, geometry.stride[1] * lattice.column_step


def windows(
    input: Tensor,
    lattice: Lattice,
    size: tuple[int, int],
    kernel: tuple[int, int],
    geometry: Geometry,
) -> tuple[Tensor, Geometry]:
    """The part of the padded input that the lattice's positions see, and how it is convolved.

    Along an axis where the first window is the convolution's first, its padding stays.
    """
    padding = list(geometry.padding)
    edges: list[int] = []
    starts = ((lattice.row, lattice.row_step), (lattice.column, lattice.column_step))
    for axis, (start, step) in enumerate(starts):
        stride, pad = geometry.stride[axis], padding[axis]
        outside = (0, 0)
        if start:
            padding[axis] = 0
            last = start + (size[axis] - 1 - start) // step * step
            begin = start * stride - pad
            reach = geometry.dilation[axis] * (kernel[axis] - 1)
            input, outside = _cut(input, 2 + axis, begin, last * stride - pad + reach + 1)
        edges = [*outside, *edges]
    if any(edges):
        input = F.pad(input, edges)
    stride, padded = _steps(lattice, geometry), (padding[0], padding[1])
    return input, geometry._replace(stride=stride, padding=padded)


def _cut(input: Tensor, axis: int, begin: int, end: int) -> tuple[Tensor, tuple[int, int]]:
    """``input`` from ``begin`` to ``end``, which may lie outside: then zeros are to be padded."""
    size = input.shape[axis]
    first, last = min(max(begin, 0), size), min(max(end, 0), size)
    if last <= first:  # wholly in the padding
        return input.narrow(axis, 0, 0), (0, max(end - begin, 0))
    return input.narrow(axis, first, last - first), (first - begin, end - last)
