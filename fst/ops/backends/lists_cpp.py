"""Products over lists of positions, by the C++ kernels for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.registry import register_backend
from fst.ops import cpp
from fst.ops.backends.lists import ByLists
from fst.ops.geometry import Geometry, is_channels_last
from fst.ops.operands import GradInput, GradWeight
from fst.ops.positions.products import Listed

FEW_CHANNELS = 8  # of the input, below which the kernel's tiles are mostly empty


class ListsByCpp(ByLists):
    """Outer products at the listed positions."""

    name = cpp.BACKEND

    def missing(self) -> str:
        return cpp.missing()

    def refuses(self, operands: GradInput | GradWeight) -> str:
        other = operands.input if isinstance(operands, GradWeight) else operands.weight
        return cpp.refuses_lists(operands.grad_output, other)

    def expected(self, operands: GradInput | GradWeight) -> float:
        if operands.lists is None and operands.weight.shape[1] < FEW_CHANNELS:
            return 0.5
        return super().expected(operands) * 2

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> Tensor:
        if cpp.refuses_lists(grad_output):  # sums of some positions, which lie apart
            grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        wanted = (weight.shape, *geometry, is_channels_last(weight))
        return cpp.list_grad_weight(grad_output, input, *listed, *wanted)

    def list_grad_input(self, operands: GradInput, listed: Listed) -> Tensor:
        maps = (operands.grad_output, operands.weight)
        return cpp.list_grad_input(*maps, *listed[:2], operands.input_shape, *operands.geometry)


LISTS_CPP = register_backend(ListsByCpp())
