"""Products over lists of positions, by PyTorch's operators: on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.registry import NO_GAIN, register_backend
from fst.ops.backends.lists import ByList, ByLists
from fst.ops.backends.lists_cpp import LISTS_CPP
from fst.ops.geometry import Geometry
from fst.ops.operands import DrawnGradInput, FixedGradWeight, Operands
from fst.ops.positions import products
from fst.ops.positions.products import Listed


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
        return lambda grad_output, input, listed: products.grad_weight(
            grad_output, input, like, listed, geometry
        )

    def list_grad_input(self, operands: DrawnGradInput, listed: Listed) -> ByList:
        where = (operands.input_shape, operands.geometry)
        return lambda grad_output, weight, listed: products.grad_input(
            grad_output, weight, listed, *where
        )


register_backend(ListsByTorch())
