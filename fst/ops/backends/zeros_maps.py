"""Products without the zeros of X or of dY, by the C++ kernels for CPUs."""

from __future__ import annotations

from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.zeros_weight import LEAST_SHARE, LEAST_WORK
from fst.ops.geometry import is_channels_last
from fst.ops.operands import Gradients, GradInput, GradWeight, Output, multiply_adds

SPEED = {"output": 0.6, "grad_input": 0.6, "grad_weight": 0.8}  # as in zeros_weight


class ZerosOfMaps(Backend):
    """Each pixel's channels that are not zero are listed; vectors run over the other channels."""

    operand = "input"

    def missing(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Output | GradInput | GradWeight) -> str:
        if isinstance(operands, GradWeight):
            if operands.changes_result:
                return "it takes all positions, and the rule leaves some out"
            maps = (operands.grad_output, operands.input)
        elif isinstance(operands, GradInput):
            maps = (operands.grad_output, operands.weight)
        else:
            maps = (operands.input, operands.weight)
        return cpp.refuses_maps(maps, operands.weight.shape, operands.geometry.groups)

    def useless(self, operands: Output | GradInput | GradWeight) -> str:
        return "" if self._share(operands) >= LEAST_SHARE else "few of its numbers are zero"

    def expected(self, operands: Output | GradInput | GradWeight) -> float:
        kept = max(1 - self._share(operands), 0.05)
        large = multiply_adds(operands) >= LEAST_WORK
        return SPEED[operands.operation] / kept if large else 0.5

    def _share(self, operands: Output | GradInput | GradWeight) -> float:
        return getattr(operands.zeros, self.operand)

    def grad_weight(self, operands: GradWeight) -> Gradients:
        grad_output, input, weight, geometry = operands[:4]
        no_list = (None, None, None, None)
        found = cpp.maps_grad_weight(
            *(grad_output, input, *no_list, weight.shape, *geometry),
            *(is_channels_last(weight), self.operand),
        )
        return None, found, None


class ZerosOfInput(ZerosOfMaps):
    """Zeros that ReLU has made in the layer's input."""

    name = "zeros_input"
    computes = {
        "output": "C++ for CPUs: zeros of the input are left out",
        "grad_weight": "C++ for CPUs: zeros of the input are left out",
    }

    def left_out(self, operands: Output | GradWeight) -> str:
        return f"zeros of X, {operands.zeros.input:.0%}"

    def output(self, operands: Output) -> Tensor:
        input, weight, bias, geometry = operands[:4]
        bias = None if bias is None else bias.contiguous()
        return cpp.maps_output(input, weight, bias, *geometry)


class ZerosOfGradOutput(ZerosOfMaps):
    """Zeros of a pruned grad_output, or of one that has come through ReLU or max pooling."""

    name = "zeros_grad_output"
    operand = "grad_output"
    computes = {
        "grad_input": "C++ for CPUs: zeros of grad_output are left out",
        "grad_weight": "C++ for CPUs: zeros of grad_output are left out",
    }

    def left_out(self, operands: GradInput | GradWeight) -> str:
        return f"zeros of dY, {operands.zeros.grad_output:.0%}"

    def grad_input(self, operands: GradInput) -> Tensor:
        grad_output, weight, geometry, input_shape = operands[:4]
        return cpp.maps_grad_input(grad_output, weight, input_shape, *geometry)


register_backend(ZerosOfInput())
register_backend(ZerosOfGradOutput())
