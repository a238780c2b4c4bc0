"""Products over lists of positions, by PyTorch's operators: on any device."""

from __future__ import annotations

from torch import Tensor

from fst.backends.registry import register_backend
from fst.ops.backends.lists import ByLists
from fst.ops.backends.lists_cpp import LISTS_CPP
from fst.ops.geometry import Geometry
from fst.ops.operands import GradInput, GradWeight
from fst.ops.positions import products
from fst.ops.positions.products import Listed


class ListsByTorch(ByLists):
    """Gathers and multiplies."""

    name = "torch"

    def useless(self, operands: GradInput | GradWeight) -> str:
        if operands.lists is not None and not LISTS_CPP.reason_against(operands):
            return "the C++ kernels compute the same"
        return super().useless(operands)

    def expected(self, operands: GradInput | GradWeight) -> float:
        return super().expected(operands) / 2

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> Tensor:
        return products.grad_weight(grad_output, input, weight, listed, geometry)

    def list_grad_input(self, operands: GradInput, listed: Listed) -> Tensor:
        where = (operands.input_shape, operands.geometry)
        return products.grad_input(operands.grad_output, operands.weight, listed, *where)


register_backend(ListsByTorch())
