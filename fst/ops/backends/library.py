"""The dense products of PyTorch's library, which skip nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fst.backends.choice import DENSE
from fst.backends.registry import NO_GAIN, Backend, register_backend
from fst.ops.geometry import convolve, gradients, input_gradient
from fst.ops.operands import (
    DrawnGradInput,
    DrawnGradWeight,
    Gradients,
    GradInput,
    GradWeight,
    Operands,
    Output,
)


class Library(Backend):
    """PyTorch's convolution and its gradients."""

    name = DENSE
    computes = {
        "output": "the library's convolution",
        "grad_input": "the library's gradient",
        "grad_weight": "the library's gradient",
    }

    def output(self, operands: Output) -> Callable[[Output], Tensor]:
        multiply = convolve(operands.input, operands.weight, operands.geometry)
        return lambda o: multiply(o.input, o.weight, o.bias)

    def grad_input(self, operands: GradInput) -> Callable[[GradInput], Tensor]:
        maps, input = (operands.grad_output, operands.weight, operands.geometry), operands.input
        if input is None:
            multiply = input_gradient(*maps, operands.input_shape)
            return lambda o: multiply(o.grad_output, o.weight)
        # Where the input was saved for grad_weight anyway, fewer operators are called with it.
        grads = gradients(maps[0], input, *maps[1:], (True, False, False))
        return lambda o: grads(o.grad_output, o.input, o.weight)[0]  # type: ignore[arg-type, return-value]

    def grad_weight(self, operands: GradWeight) -> Callable[[GradWeight], Gradients]:
        wanted = (operands.joint, True, operands.bias)
        maps = (operands.grad_output, operands.input, operands.weight)
        grads = gradients(*maps, operands.geometry, wanted)
        return lambda o: grads(o.grad_output, o.input, o.weight)  # type: ignore[return-value]

    drawn_grad_input = grad_input
    drawn_grad_weight = grad_weight


register_backend(Library())


def with_grad_input(
    operands: GradWeight, multiply: Callable[[GradWeight], Tensor]
) -> Callable[[GradWeight], Gradients]:
    """A dW that is computed by itself, and the dense dX if it is wanted too.

    A backend of dW alone is so timed as it is used, which the library's call for both is compared
    with.
    """
    if not operands.joint:
        return lambda o: (None, multiply(o), None)
    maps = (operands.grad_output, operands.input, operands.weight)
    grads = gradients(*maps, operands.geometry, (True, False, False))
    return lambda o: (grads(o.grad_output, o.input, o.weight)[0], multiply(o), None)


def all_kept(operands: Operands) -> str:
    """Says that a rule draws all positions of these operands; "" if it leaves some."""
    drawn = isinstance(operands, DrawnGradInput | DrawnGradWeight)
    if drawn and operands.kept == operands.positions:  # type: ignore[attr-defined]
        return f"{NO_GAIN}all positions are kept"
    return ""
