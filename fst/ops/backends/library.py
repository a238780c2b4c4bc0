"""The dense products of PyTorch's library, which leave nothing out."""

from __future__ import annotations

from torch import Tensor

from fst.backends.choice import DENSE
from fst.backends.registry import Backend, register_backend
from fst.ops.geometry import convolve, gradients, input_gradient
from fst.ops.operands import Gradients, GradInput, GradWeight, Output


class Library(Backend):
    """PyTorch's convolution and its gradients."""

    name = DENSE
    computes = {
        "output": "the library's convolution",
        "grad_input": "the library's gradient",
        "grad_weight": "the library's gradient",
    }

    def refuses(self, operands: Output | GradInput | GradWeight) -> str:
        """Rules of the input leave positions or columns out, which changes the result."""
        if isinstance(operands, GradWeight) and operands.changes_result:
            return "it leaves nothing out, and the rule does"
        return ""

    def output(self, operands: Output) -> Tensor:
        return convolve(operands.input, operands.weight, operands.bias, operands.geometry)

    def grad_input(self, operands: GradInput) -> Tensor:
        grad_output, weight, geometry = operands[:3]
        if operands.input is None:
            return input_gradient(grad_output, weight, geometry, operands.input_shape)
        # Where the input was saved for grad_weight anyway, fewer operators are called with it.
        found = gradients(grad_output, operands.input, weight, geometry, (True, False, False))[0]
        assert found is not None  # needed
        return found

    def grad_weight(self, operands: GradWeight) -> Gradients:
        maps = (operands.grad_output, operands.input, operands.weight)
        wanted = (operands.joint, True, operands.bias)
        grad_input, grad_weight, grad_bias = gradients(*maps, operands.geometry, wanted)
        assert grad_weight is not None  # needed
        return grad_input, grad_weight, grad_bias


register_backend(Library())
