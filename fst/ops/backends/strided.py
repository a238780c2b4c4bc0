"""The positions of a lattice as a larger stride: a dense weight gradient of the library.

Over a lattice the sum  dW = Σ dY[kept] · X[kept]ᵀ  is the weight gradient of the same convolution
with the stride multiplied by the lattice's step. Half of the positions are half the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops.backends.lists import by_lattice, share_of_positions
from fst.ops.geometry import ONLY_WEIGHT, Geometry, gradients
from fst.ops.operands import FixedGradWeight, Gradients
from fst.rules.rule import Lattice


class Strided(Backend):
    """The library's kernel with a larger stride."""

    name = "strided"
    computes = {"grad_weight": "the library's kernel with a larger stride (FST, Eq. 10)"}

    def skipped(self, operands: FixedGradWeight) -> str:
        return share_of_positions(operands)

    def fixed_grad_weight(
        self, operands: FixedGradWeight
    ) -> Callable[[FixedGradWeight], Gradients]:
        return _multiply


def _multiply(operands: FixedGradWeight) -> Gradients:
    grad_output, input, weight = operands.grad_output, operands.input, operands.weight
    size = (grad_output.shape[2], grad_output.shape[3])
    kernel = (weight.shape[2], weight.shape[3])

    def multiply(sums: Tensor, lattice: Lattice) -> Tensor:
        image, strided = windows(input, lattice, size, kernel, operands.geometry)
        total = gradients(sums, image, weight, strided, ONLY_WEIGHT)(sums, image, weight)[1]
        assert total is not None
        return total

    return by_lattice(operands, multiply)


register_backend(Strided())


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
        step_of_input, pad = geometry.stride[axis], padding[axis]
        outside = (0, 0)
        if start:
            padding[axis] = 0
            last = start + (size[axis] - 1 - start) // step * step
            begin = start * step_of_input - pad
            reach = geometry.dilation[axis] * (kernel[axis] - 1)
            input, outside = _cut(input, 2 + axis, begin, last * step_of_input - pad + reach + 1)
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
