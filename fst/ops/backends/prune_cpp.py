"""Pruning by the C++ kernels for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import PrunedWeight, is_of_weight


class PruneByKernel(Backend):
    """Base class of the pruning kernels for CPUs and GPUs: the form of operands and results.

    Attributes:
        most_m: the largest groups of weights.
    """

    most_m: ClassVar[int]

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        """The kernels know N:M by magnitude."""
        if isinstance(operands, PruneWeight):
            if operands.mask is not None:
                return "the mask is kept from an earlier step"
            patterns = operands.strategy.weight_patterns
            if patterns is None or max(patterns) > self.most_m:
                return f"it knows N:M by magnitude alone, M up to {self.most_m}"
        return ""


class PruneByCpp(PruneByKernel):
    """One read, one write; both directions of a weight from one read."""

    name = cpp.BACKEND
    most_m = cpp.MOST_M
    computes = {
        "prune_weight": "C++ for CPUs: both directions from one read",
        "prune_grad_output": "C++ for CPUs: one read, one write; rescaling passes twice",
        "prune_columns": "C++ for CPUs: one read, one write",
    }

    def missing(self) -> str:
        return cpp.missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, PruneWeight):
            return cpp.refuses_weight(operands.weight, operands.dtype)
        maps = operands.maps if operands.across is None else operands.across
        _, m, kind, rescale = operands.pattern
        return cpp.refuses_grad_output(maps, m, kind, rescale)

    def expected(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed must draw the same whether the kernels are compiled or not."""
        return 0.5 if operands.draws else 2.0

    def prune_weight(self, operands: PruneWeight) -> PrunedWeight:
        weight, strategy, groups, dtype = operands[:4]
        patterns = strategy.weight_patterns
        assert patterns is not None  # not refused
        return from_kernel(operands, cpp.prune_weight(weight, groups, patterns, dtype))

    def prepare(self, operands: PruneWeight) -> Callable[[Tensor], PrunedWeight]:
        """`prune_weight` for weights of the form of this one."""
        weight, strategy, groups, dtype = operands[:4]
        patterns = strategy.weight_patterns
        assert patterns is not None  # not refused
        prune = cpp.WeightPruning(weight, groups, patterns, dtype)
        return lambda weight: from_kernel(operands._replace(weight=weight), prune(weight))

    def prune_grad_output(self, operands: PruneMaps) -> Tensor:
        pattern, across = operands.pattern, operands.across
        if across is not None:
            pruned = cpp.prune_grad_output(across, *pattern, groups=1, seed=None)
            return pruned.squeeze(3).transpose(1, 2).reshape(operands.maps.shape)
        return cpp.prune_grad_output(operands.maps, *pattern, operands.groups, operands.seed())

    prune_columns = prune_grad_output


def from_kernel(operands: PruneWeight, pruned: Sequence[Tensor]) -> PrunedWeight:
    """``pruned``: S(W), S(Wᵀ) and the mask of S(W), as far as the strategy's patterns name them."""
    weight, strategy, _, dtype = operands[:4]
    patterns, results = strategy.weight_patterns, iter(pruned)
    assert patterns is not None  # a kernel has run
    first = next(results) if patterns[0] else weight.to(dtype)
    transposed = first
    if patterns[2]:
        transposed = next(results)
    elif not is_of_weight(strategy.grad_input):
        transposed = weight.to(dtype)
    return PrunedWeight(first, transposed, next(results, None))


register_backend(PruneByCpp())
