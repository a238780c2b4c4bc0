"""Y and dX without the zeros of the weight, by the C++ kernels for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.operands import GradInput, Output, multiply_adds

LEAST_SHARE = 0.25  # of zeros, below which no measurement is worth its time
LEAST_WORK = 2**24  # multiply-adds, below which a dense product is expected to be faster
SPEED = 0.7  # of the kernel's multiply-adds, relative to the library's


class ZerosOfWeight(Backend):
    """Lists of the weights that are not zero; vectors run over images or pixels."""

    name = "zeros_weight"
    is_timed = True
    computes = {
        "output": "C++ for CPUs: zeros of the weight are left out",
        "grad_input": "C++ for CPUs: zeros of the weight are left out",
    }

    def missing(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Output | GradInput) -> str:
        if isinstance(operands, Output):
            return cpp.refuses_zeros(operands.input, operands.weight, operands.geometry)
        maps = (operands.grad_output, operands.weight, operands.geometry)
        return cpp.refuses_zeros(*maps, operands.input_shape)

    def useless(self, operands: Output | GradInput) -> str:
        return "" if operands.zeros.weight >= LEAST_SHARE else "few weights are zero"

    def expected(self, operands: Output | GradInput) -> float:
        return SPEED / self.work(operands) if multiply_adds(operands) >= LEAST_WORK else 0.5

    def work(self, operands: Output | GradInput) -> float:
        return max(1 - operands.zeros.weight, 0.05)

    def left_out(self, operands: Output | GradInput) -> str:
        return f"zeros of W, {operands.zeros.weight:.0%}"

    def output(self, operands: Output) -> Tensor:
        input, weight, bias, geometry = operands[:4]
        bias = None if bias is None else bias.to(torch.float32)
        return cpp.zeros_output(input, weight, bias, None, *geometry)

    def grad_input(self, operands: GradInput) -> Tensor:
        grad_output, weight, geometry, input_shape = operands[:4]
        return cpp.zeros_grad_input(grad_output, weight, input_shape, *geometry)


register_backend(ZerosOfWeight())
