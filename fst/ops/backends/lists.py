"""Products over a list of output positions: drawn ones, or the fixed ones of FST's Eq. 10."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fst.backends.registry import Backend
from fst.ops.backends.library import all_kept, with_grad_input
from fst.ops.geometry import Geometry
from fst.ops.operands import (
    DrawnGradInput,
    DrawnGradWeight,
    FixedGradWeight,
    Gradients,
    GradWeight,
    Operands,
)
from fst.ops.positions import draw
from fst.ops.positions.draw import Listed
from fst.ops.positions.lists import mean_of
from fst.rules.rule import Lattice

OPERATIONS = {
    "grad_weight": "products at the listed positions",
    "grad_input": "products at the listed positions, added at their taps",
}
ByList = Callable[[Tensor, Tensor, Listed], Tensor]  # of dY, of X or W, and of a list


def share_of_positions(operands: Any) -> str:
    """The share of the positions that a rule omits, as text."""
    return f"{1 - operands.rule.density:.0%} of the positions"


def by_lattice(
    operands: FixedGradWeight, multiply: Callable[[Tensor, Lattice], Tensor]
) -> Gradients:
    """Σ of ``multiply`` over the lattices of kept positions, with what the rule sums there."""
    grad_output, lattices = operands.grad_output, operands.lattices
    kept = operands.rule.summed(grad_output, lattices, operands.phase)
    parts = [multiply(f, p) for f, p in zip(kept, lattices, strict=True) if f.numel()]
    if not parts:
        empty = operands.weight.new_zeros(operands.weight.shape, dtype=grad_output.dtype)
        return None, empty, None
    return None, functools.reduce(Tensor.add_, parts), None


class ByLists(Backend, abc.ABC):
    """A backend that multiplies at listed positions; a subclass has the two products."""

    computes = OPERATIONS

    @abc.abstractmethod
    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> ByList:
        """Σ_j scale_j · dY[source_j] · (X − mean)[window of places_j]ᵀ + sums · meanᵀ, dW of the
        dtype of grad_output, as a function of dY, X and a list of this form.
        """

    @abc.abstractmethod
    def list_grad_input(self, operands: DrawnGradInput, listed: Listed) -> ByList:
        """Σ_j scale_j · Wᵀ dY[places_j], added at the taps of position j, as a function of dY, W
        and a list of this form.
        """

    def refuses(self, operands: Operands) -> str:
        return all_kept(operands)

    def cost(self, operands: Operands) -> float:
        # Whoever draws positions wants to save time.
        return 1.0 if isinstance(operands, FixedGradWeight) else 1e-3

    def skipped(self, operands: Any) -> str:
        return share_of_positions(operands)

    def drawn_grad_weight(self, operands: DrawnGradWeight) -> Callable[[GradWeight], Gradients]:
        listed, geometry = listed_of(operands), operands.geometry
        maps = (operands.grad_output, operands.input, operands.weight)
        multiply = self.list_grad_weight(*maps, listed, geometry)
        return with_grad_input(
            operands,
            lambda o: multiply(o.grad_output, o.input, listed_of(o)),  # type: ignore[arg-type]
        )

    def drawn_grad_input(self, operands: DrawnGradInput) -> Callable[[DrawnGradInput], Tensor]:
        multiply = self.list_grad_input(operands, _drawn(operands))
        return lambda o: multiply(o.grad_output, o.weight, _drawn(o))

    def fixed_grad_weight(
        self, operands: FixedGradWeight
    ) -> Callable[[FixedGradWeight], Gradients]:
        rule, geometry = operands.rule, operands.geometry
        planned: dict[Lattice, tuple[Listed, ByList]] = {}

        def product(operands: FixedGradWeight, sums: Tensor, lattice: Lattice) -> Tensor:
            grad_output, input = operands.grad_output, operands.input
            if not rule.sums_positions:
                sums = grad_output
            if lattice not in planned:
                size = (grad_output.shape[2], grad_output.shape[3])
                listed = draw.fixed(lattice, len(input), size, input.device)
                if not rule.sums_positions:
                    listed = listed._replace(source=None)
                multiply = self.list_grad_weight(sums, input, operands.weight, listed, geometry)
                planned[lattice] = listed, multiply
            listed, multiply = planned[lattice]
            return multiply(sums, input, listed)

        return lambda o: by_lattice(o, functools.partial(product, o))


def listed_of(operands: DrawnGradWeight) -> Listed:
    """The drawn list of dW, and what it is centred by."""
    lists, rule = operands.lists, operands.rule
    drawn = lists.of(rule, operands.kept)
    if not rule.center:
        return Listed(*drawn)
    return Listed(*drawn, mean_of(operands.input), lists.sums(rule))


def _drawn(operands: DrawnGradInput) -> Listed:
    return Listed(*operands.lists.of(operands.rule, operands.kept))
