"""Products without the zeros of X or of dY, by the C++ kernels for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.zeros_weight import LEAST_SHARE, LEAST_WORK
from fst.ops.geometry import is_channels_last
from fst.ops.operands import (
    Gradients,
    GradInput,
    GradWeight,
    Output,
    multiply_adds,
)
from fst.ops.positions import draw
from fst.ops.positions.lists import mean_of
from fst.rules.sampled import samples

HALF = 0.5
LEAST_LEFT = 0.05  # of the work, however many zeros there are
SPEED = {"output": 0.6, "grad_input": 0.6, "grad_weight": 0.8}  # as in zeros_weight


def _is_joint(operands: Output | GradInput | GradWeight) -> bool:
    """True where one half of the work is a dense dX."""
    return isinstance(operands, GradWeight) and operands.joint


class ZerosOfMaps(Backend):
    """Each pixel's channels that are not zero are listed; vectors run over the other channels."""

    operand = "input"
    is_timed = True

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
        if multiply_adds(operands) < LEAST_WORK:
            return 0.5
        alone = SPEED[operands.operation] / max(1 - self._share(operands), LEAST_LEFT)
        return 2 / (1 + 1 / alone) if _is_joint(operands) else alone

    def work(self, operands: Output | GradInput | GradWeight) -> float:
        share = self._share(operands)
        return max(1 - (share / 2 if _is_joint(operands) else share), LEAST_LEFT)

    def _share(self, operands: Output | GradInput | GradWeight) -> float:
        share: float = getattr(operands.zeros, self.operand)
        return share

    def grad_weight(self, operands: GradWeight) -> Gradients:
        grad_output, input, weight, geometry = operands[:4]
        no_list = (None, None, None, None)
        found = cpp.maps_grad_weight(
            *(grad_output, input, *no_list, weight.shape, *geometry),
            *(is_channels_last(weight), self.operand),
        )
        return operands.with_grad_input(found)


class ZerosOfInput(ZerosOfMaps):
    """Zeros that ReLU has made in the layer's input."""

    name = "zeros_input"
    computes = {
        "output": "C++ for CPUs: zeros of the input are left out",
        "grad_weight": "C++ for CPUs: zeros of the input are left out",
    }

    def useless(self, operands: Output | GradInput | GradWeight) -> str:
        if isinstance(operands, Output) and operands.zeros.weight >= HALF:
            return "half of the weight is zero, and its kernel is the faster one"
        return super().useless(operands)

    def left_out(self, operands: Output | GradInput | GradWeight) -> str:
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

    def left_out(self, operands: Output | GradInput | GradWeight) -> str:
        return f"zeros of dY, {operands.zeros.grad_output:.0%}"

    def grad_input(self, operands: GradInput) -> Tensor:
        grad_output, weight, geometry, input_shape = operands[:4]
        return cpp.maps_grad_input(grad_output, weight, input_shape, *geometry)


class ListedZeros(ZerosOfMaps):
    """dW over listed positions, drawn or fixed, without the zeros of the input there."""

    name = "listed_zeros"
    computes = {"grad_weight": "C++ for CPUs: zeros of the input at listed positions are left out"}

    def applies(self, operands: Output | GradInput | GradWeight) -> bool:
        if not isinstance(operands, GradWeight):
            return False
        return operands.lists is not None or operands.lattices is not None

    def refuses(self, operands: Output | GradInput | GradWeight) -> str:
        assert isinstance(operands, GradWeight)  # it applies
        maps = (operands.grad_output, operands.input)
        return cpp.refuses_maps(maps, operands.weight.shape, operands.geometry.groups)

    def useless(self, operands: Output | GradInput | GradWeight) -> str:
        assert isinstance(operands, GradWeight)  # it applies
        if operands.lists is not None and operands.kept == operands.positions:
            return "all positions are kept"
        if operands.lists is None and not operands.changes_result:
            return "the output map is too small for the rule"
        return super().useless(operands)

    def expected(self, operands: Output | GradInput | GradWeight) -> float:
        """Less than the lists without zeros: the choice between them is never made blindly."""
        return 0.0

    def left_out(self, operands: Output | GradInput | GradWeight) -> str:
        assert isinstance(operands, GradWeight) and operands.rule is not None  # it applies
        share = f"{1 - operands.rule.density:.0%} of the positions"
        return f"{share}, zeros of X, {operands.zeros.input:.0%}"

    def grad_weight(self, operands: GradWeight) -> Gradients:
        grad_output, input, weight, geometry, rule = operands[:5]
        lists = operands.lists
        wanted = (weight.shape, *geometry, is_channels_last(weight), self.operand)
        if lists is None:
            sums, index = _fixed(operands)
            fixed = (index, None, None, None)
            return None, cpp.maps_grad_weight(sums, input, *fixed, *wanted), None
        assert samples(rule)  # its lists are drawn
        index, scale = lists.of(rule, operands.kept)
        center = (mean_of(input), lists.sums(rule)) if rule.center else (None, None)
        found = cpp.maps_grad_weight(grad_output, input, index, scale, *center, *wanted)
        return operands.with_grad_input(found)


def _fixed(operands: GradWeight) -> tuple[Tensor, Tensor]:
    """A map that holds the rule's sums of grad_output at its kept positions, and their list."""
    grad_output, rule, lattices = operands.grad_output, operands.rule, operands.lattices
    assert rule is not None and lattices is not None  # it applies
    size = (grad_output.shape[2], grad_output.shape[3])
    sums, places = torch.zeros_like(grad_output), []
    summed = rule.summed(grad_output, lattices, operands.phase)
    for part, lattice in zip(summed, lattices, strict=True):
        lattice.of(sums).copy_(part)
        places.append(draw.fixed(lattice, len(grad_output), size, grad_output.device).places)
    return sums, places[0] if len(places) == 1 else torch.cat(places).sort().values


register_backend(ZerosOfInput())
register_backend(ListedZeros())
register_backend(ZerosOfGradOutput())
