"""Products without the zeros of X or of dY, by the C++ kernels for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fst.backends.registry import NO_GAIN, Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.library import all_kept, with_grad_input
from fst.ops.backends.lists import listed_of, share_of_positions
from fst.ops.backends.zeros_weight import are_few, cost_of
from fst.ops.geometry import is_channels_last
from fst.ops.operands import (
    DrawnGradWeight,
    FixedGradWeight,
    Gradients,
    GradInput,
    GradWeight,
    Output,
)
from fst.ops.positions import draw

Product = Output | GradInput | GradWeight


class ZerosOfMaps(Backend):
    """Each pixel's channels that are not zero are listed; vectors run over the other channels.

    Attributes:
        operand: whose zeros are skipped.
    """

    operand: ClassVar[str] = "input"

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Product) -> str:
        weight = operands.weight
        if isinstance(operands, GradWeight):
            maps = (operands.grad_output, operands.input)
        elif isinstance(operands, GradInput):
            maps = (operands.grad_output, weight)
        else:
            maps = (operands.input, weight)
        reason = cpp.refuses_maps(maps, weight.shape, operands.geometry.groups)
        few = are_few(self._share(operands))
        return reason or (f"{NO_GAIN}few of its numbers are zero" if few else "")

    def cost(self, operands: Product) -> float:
        speed = 0.8 if operands.operation == "grad_weight" else 0.6
        return cost_of(operands, speed, self._share(operands))

    def _share(self, operands: Product) -> float:
        share: float = getattr(operands.zeros, self.operand)
        return share

    def _wanted(self, operands: GradWeight) -> tuple[object, ...]:
        weight = operands.weight
        return weight.shape, *operands.geometry, is_channels_last(weight), self.operand


class ZerosAnywhere(ZerosOfMaps):
    """Products over all positions, which a rule may draw from."""

    def grad_weight(self, operands: GradWeight) -> Callable[[GradWeight], Gradients]:
        maps, no_list = (operands.grad_output, operands.input), (None, None, None, None)
        multiply = cpp.maps_grad_weight.plan(*maps, *no_list, *self._wanted(operands))
        return with_grad_input(operands, lambda o: multiply(o.grad_output, o.input, *no_list))

    drawn_grad_weight = grad_weight


class ZerosOfInput(ZerosAnywhere):
    """Zeros that ReLU has made in the layer's input."""

    name = "zeros_input"
    computes = {
        "output": "C++ for CPUs: zeros of the input are skipped",
        "grad_weight": "C++ for CPUs: zeros of the input are skipped",
    }

    def refuses(self, operands: Product) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, Output) and operands.zeros.weight >= 0.5:
            return f"{NO_GAIN}half of the weight is zero, and its kernel is the faster one"
        return ""

    def skipped(self, operands: Product) -> str:
        return f"zeros of X, {operands.zeros.input:.0%}"

    def output(self, operands: Output) -> Callable[[Output], Tensor]:
        bias = _contiguous(operands.bias)
        multiply = cpp.maps_output.plan(operands.input, operands.weight, bias, *operands.geometry)
        if bias is None:
            return lambda o: multiply(o.input, o.weight, None)
        return lambda o: multiply(o.input, o.weight, _contiguous(o.bias))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


class ZerosOfGradOutput(ZerosAnywhere):
    """Zeros of a pruned grad_output, or of one that has come through ReLU or max pooling."""

    name = "zeros_grad_output"
    operand = "grad_output"
    computes = {
        "grad_input": "C++ for CPUs: zeros of grad_output are skipped",
        "grad_weight": "C++ for CPUs: zeros of grad_output are skipped",
    }

    def skipped(self, operands: Product) -> str:
        return f"zeros of dY, {operands.zeros.grad_output:.0%}"

    def grad_input(self, operands: GradInput) -> Callable[[GradInput], Tensor]:
        given = (operands.grad_output, operands.weight, operands.input_shape, *operands.geometry)
        multiply = cpp.maps_grad_input.plan(*given)
        return lambda o: multiply(o.grad_output, o.weight)

    drawn_grad_input = grad_input


class ListedZeros(ZerosOfMaps):
    """dW over listed positions, drawn or fixed, without the zeros of the input there."""

    name = "listed_zeros"
    computes = {"grad_weight": "C++ for CPUs: zeros of the input at listed positions are skipped"}

    def refuses(self, operands: Product) -> str:
        return super().refuses(operands) or all_kept(operands)

    def cost(self, operands: Product) -> float:
        return 1e3 * super().cost(operands)  # only a measurement may choose it

    def skipped(self, operands: Product) -> str:
        return f"{share_of_positions(operands)}, {operands.zeros.input:.0%} zeros of X"

    def drawn_grad_weight(self, operands: DrawnGradWeight) -> Callable[[GradWeight], Gradients]:
        maps, listed = (operands.grad_output, operands.input), listed_of(operands)
        chosen = listed.places, listed.scale, listed.mean, listed.sums
        multiply = cpp.maps_grad_weight.plan(*maps, *chosen, *self._wanted(operands))

        def product(operands: GradWeight) -> Tensor:
            assert isinstance(operands, DrawnGradWeight)  # as planned
            places, scale, _, mean, sums = listed_of(operands)
            found: Tensor = multiply(
                operands.grad_output, operands.input, places, scale, mean, sums
            )
            return found

        return with_grad_input(operands, product)

    def fixed_grad_weight(
        self, operands: FixedGradWeight
    ) -> Callable[[FixedGradWeight], Gradients]:
        sums, index = _fixed(operands)
        fixed = (index, None, None, None)
        multiply = cpp.maps_grad_weight.plan(sums, operands.input, *fixed, *self._wanted(operands))

        def product(operands: FixedGradWeight) -> Gradients:
            sums, index = _fixed(operands)
            return None, multiply(sums, operands.input, index, None, None, None), None

        return product


def _fixed(operands: FixedGradWeight) -> tuple[Tensor, Tensor]:
    """A map that holds the rule's sums of grad_output at its kept positions, and their list."""
    grad_output, lattices = operands.grad_output, operands.lattices
    size = (grad_output.shape[2], grad_output.shape[3])
    sums, places = torch.zeros_like(grad_output), []
    summed = operands.rule.summed(grad_output, lattices, operands.phase)
    for part, lattice in zip(summed, lattices, strict=True):
        lattice.of(sums).copy_(part)
        places.append(draw.fixed(lattice, len(grad_output), size, grad_output.device).places)
    return sums, places[0] if len(places) == 1 else torch.cat(places).sort().values


register_backend(ZerosOfInput())
register_backend(ListedZeros())
register_backend(ZerosOfGradOutput())
