"""Y and dX without the zeros of the weight, by the C++ kernels for CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fst.backends.registry import NO_GAIN, Backend, register_backend
from fst.ops import cpp
from fst.ops.operands import GradInput, GradWeight, Output


# Numbers that decide in compiled code are literals: torch.compile(dynamic=True) makes symbols of a
# module's numbers, and a symbol of one layer's graph cannot be compared in another's.
def are_few(share: float) -> bool:
    """True of a share of zeros below which no measurement is worth its time."""
    return share < 0.25


def cost_of(operands: Output | GradInput | GradWeight, speed: float, share: float) -> float:
    """Predicted time, relative to the dense product, of a kernel that skips a share of zeros.

    Args:
        speed: of the kernel's multiply-adds, relative to the library's.
    """
    cost = max(1 - share, 0.05) / speed
    if isinstance(operands, GradWeight) and operands.joint:  # half of the work is a dense dX
        cost = (1 + cost) / 2
    is_small = operands.multiply_adds < 2**24
    return 100.0 * cost if is_small else cost


class ZerosOfWeight(Backend):
    """Lists of the weights that are not zero; vectors run over images or pixels."""

    name = "zeros_weight"
    computes = {
        "output": "C++ for CPUs: zeros of the weight are skipped",
        "grad_input": "C++ for CPUs: zeros of the weight are skipped",
    }

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Output | GradInput) -> str:
        if isinstance(operands, Output):
            reason = cpp.refuses_zeros(operands.input, operands.weight, operands.geometry)
        else:
            maps = (operands.grad_output, operands.weight, operands.geometry)
            reason = cpp.refuses_zeros(*maps, operands.input_shape)
        few = are_few(operands.zeros.weight)
        return reason or (f"{NO_GAIN}few weights are zero" if few else "")

    def cost(self, operands: Output | GradInput) -> float:
        return cost_of(operands, 0.7, operands.zeros.weight)

    def skipped(self, operands: Output | GradInput) -> str:
        return f"zeros of W, {operands.zeros.weight:.0%}"

    def output(self, operands: Output) -> Callable[[Output], Tensor]:
        bias = _single(operands.bias)
        given = (operands.input, operands.weight, bias, None, *operands.geometry)
        multiply = cpp.zeros_output.plan(*given)
        if bias is None:
            return lambda o: multiply(o.input, o.weight, None, None)
        return lambda o: multiply(o.input, o.weight, _single(o.bias), None)

    def grad_input(self, operands: GradInput) -> Callable[[GradInput], Tensor]:
        given = (operands.grad_output, operands.weight, operands.input_shape, *operands.geometry)
        multiply = cpp.zeros_grad_input.plan(*given)
        return lambda o: multiply(o.grad_output, o.weight)

    drawn_grad_input = grad_input


def _single(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


register_backend(ZerosOfWeight())
