"""Products over a list of output positions: drawn ones, or the fixed ones of FST's Eq. 10."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import Tensor

from fst.backends.registry import Backend
from fst.ops.geometry import Geometry
from fst.ops.operands import Gradients, GradInput, GradWeight
from fst.ops.positions import draw
from fst.ops.positions.lists import mean_of
from fst.ops.positions.products import Listed
from fst.rules.rule import Lattice
from fst.rules.sampled import samples

OPERATIONS = {
    "grad_weight": "products at the listed positions",
    "grad_input": "products at the listed positions, added at their taps",
}


class FixedPositions(Backend):
    """A backend that may compute dW over the fixed positions of a rule of the input."""

    def applies(self, operands: GradInput | GradWeight) -> bool:
        return isinstance(operands, GradWeight) and operands.lattices is not None

    def useless(self, operands: GradInput | GradWeight) -> str:
        if isinstance(operands, GradWeight) and not operands.changes_result:
            return "the output map is too small for the rule"
        return ""

    def left_out(self, operands: GradInput | GradWeight) -> str:
        assert operands.rule is not None  # it applies
        return f"{1 - operands.rule.density:.0%} of the positions"

    def by_lattice(
        self, operands: GradWeight, multiply: Callable[[Tensor, Lattice], Tensor]
    ) -> Tensor:
        """Σ of ``multiply`` over the lattices of kept positions, with what the rule sums there."""
        grad_output, weight, rule, lattices = (
            operands.grad_output,
            operands.weight,
            operands.rule,
            operands.lattices,
        )
        assert rule is not None and lattices is not None  # it applies
        kept = rule.summed(grad_output, lattices, operands.phase)
        parts = [multiply(f, p) for f, p in zip(kept, lattices, strict=True) if f.numel()]
        if not parts:
            return weight.new_zeros(weight.shape, dtype=grad_output.dtype)
        return functools.reduce(Tensor.add_, parts)


class ByLists(FixedPositions):
    """A backend that multiplies at listed positions; a subclass has the two products."""

    computes = OPERATIONS

    def list_grad_weight(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
    ) -> Tensor:
        """As `fst.ops.positions.products.grad_weight`."""
        raise TypeError(f"{type(self).__name__} has no weight gradient.")

    def list_grad_input(self, operands: GradInput, listed: Listed) -> Tensor:
        """As `fst.ops.positions.products.grad_input`."""
        raise TypeError(f"{type(self).__name__} has no input gradient.")

    def applies(self, operands: GradInput | GradWeight) -> bool:
        return operands.lists is not None or super().applies(operands)

    def useless(self, operands: GradInput | GradWeight) -> str:
        if operands.lists is None:
            return super().useless(operands)
        return "all positions are kept" if operands.kept == operands.positions else ""

    def expected(self, operands: GradInput | GradWeight) -> float:
        """Whoever draws positions wants to save time; nothing else is asked where none is known."""
        return math.inf if operands.lists is not None else 1.0

    def grad_weight(self, operands: GradWeight) -> Gradients:
        grad_output, input, weight, geometry, rule = operands[:5]
        lists = operands.lists
        if lists is None:
            return None, self.by_lattice(operands, functools.partial(self._fixed, operands)), None
        assert samples(rule)  # its lists are drawn
        drawn = lists.of(rule, operands.kept)
        center = (mean_of(input), lists.sums(rule)) if rule.center else ()
        listed = Listed(*drawn, None, *center)
        found = self.list_grad_weight(grad_output, input, weight, listed, geometry)
        return operands.with_grad_input(found)

    def _fixed(self, operands: GradWeight, sums: Tensor, lattice: Lattice) -> Tensor:
        grad_output, input, weight, geometry, rule = operands[:5]
        size = (grad_output.shape[2], grad_output.shape[3])
        listed = draw.fixed(lattice, len(input), size, input.device)
        assert rule is not None  # of fixed positions
        if rule.summed_block == (1, 1):
            sums, listed = grad_output, listed._replace(source=None)
        return self.list_grad_weight(sums, input, weight, listed, geometry)

    def grad_input(self, operands: GradInput) -> Tensor:
        lists, rule = operands.lists, operands.rule
        assert lists is not None and samples(rule)  # it applies
        return self.list_grad_input(operands, Listed(*lists.of(rule, operands.kept)))
