"""Products over lists of positions, by the C++ kernels for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.registry import register_backend
from fst.ops import cpp
from fst.ops.backends.lists import ByList, ByLists
from fst.ops.geometry import Geometry, is_channels_last
from fst.ops.operands import DrawnGradInput, FixedGradWeight, GradWeight, Operands
from fst.ops.positions.products import Listed

FEW_CHANNELS = 8  # of the input, below which the kernel's tiles are mostly empty


class ListsByCpp(ByLists):
    """Outer products at the listed positions."""

    name = cpp.BACKEND

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Operands) -> str:
        other = operands.input if isinstance(operands, GradWeight) else operands.weight  # type: ignore[attr-defined]
        reason = cpp.refuses_lists(operands.grad_output, other)  # type: ignore[attr-defined]
        return reason or super().refuses(operands)

    def cost(self, operands: Operands) -> float:
        if isinstance(operands, FixedGradWeight) and operands.weight.shape[1] < FEW_CHANNELS:
            return 2.0
        return super().cost(operands) / 2

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> ByList:
        if cpp.refuses_lists(grad_output):  # sums of some positions, which lie apart
            last = torch.channels_last
            multiply = self.list_grad_weight(
                grad_output.contiguous(memory_format=last), input, weight, listed, geometry
            )
            return lambda sums, input, listed: multiply(
                sums.contiguous(memory_format=last), input, listed
            )
        wanted = (weight.shape, *geometry, is_channels_last(weight))
        planned = cpp.list_grad_weight.plan(grad_output, input, *listed, *wanted)
        return lambda grad_output, input, listed: planned(grad_output, input, *listed)

    def list_grad_input(self, operands: DrawnGradInput, listed: Listed) -> ByList:
        wanted = (operands.input_shape, *operands.geometry)
        maps = (operands.grad_output, operands.weight)
        planned = cpp.list_grad_input.plan(*maps, *listed[:2], *wanted)
        return lambda grad_output, weight, listed: planned(grad_output, weight, *listed[:2])


LISTS_CPP = register_backend(ListsByCpp())
