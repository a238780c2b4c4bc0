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

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, PruneWeight):
            return cpp.refuses_weight(operands.weight, operands.dtype)
        maps = operands.maps if operands.across is None else operands.across
        _, m, kind, rescale = operands.pattern
        return cpp.refuses_grad_output(maps, m, kind, rescale)

    def cost(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed must draw the same whether the kernels are compiled or not."""
        return 2.0 if operands.draws else 0.5

    def prune_weight(self, operands: PruneWeight) -> Callable[[PruneWeight], PrunedWeight]:
        patterns = operands.strategy.weight_patterns
        assert patterns is not None  # not refused
        prune = cpp.prune_weight.plan(operands.weight, operands.groups, patterns, operands.dtype)
        return from_kernel(operands, prune)

    def prune_grad_output(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        pattern, groups = operands.pattern, operands.groups
        if operands.across is not None:
            shape = operands.maps.shape
            prune = cpp.prune_grad_output.plan(operands.across, *pattern, 1, None)
            return lambda o: prune(o.across).squeeze(3).transpose(1, 2).reshape(shape)
        if operands.draws:
            return lambda o: cpp.prune_grad_output(o.maps, *pattern, groups, o.seed())
        prune = cpp.prune_grad_output.plan(operands.maps, *pattern, groups, None)
        return lambda o: prune(o.maps)

    prune_columns = prune_grad_output


def from_kernel(
    operands: PruneWeight, prune: Callable[[Tensor], Sequence[Tensor]]
) -> Callable[[PruneWeight], PrunedWeight]:
    """Pruning by a kernel that returns S(W), S(Wᵀ) and the mask of S(W), as far as the strategy's
    patterns name them.
    """
    dtype, patterns = operands.dtype, operands.strategy.weight_patterns
    assert patterns is not None  # a kernel runs
    casts = operands.weight.dtype != dtype
    is_own, follows = bool(patterns[2]), is_of_weight(operands.strategy.grad_input)
    prunes_output = bool(patterns[0])

    def run(operands: PruneWeight) -> PrunedWeight:
        results = prune(operands.weight)
        first = transposed = results[0]
        if not prunes_output or not (is_own or follows):
            dense = operands.weight.to(dtype) if casts else operands.weight
            first = results[0] if prunes_output else dense
            transposed = dense
        if is_own:
            transposed = results[1] if prunes_output else results[0]
        return PrunedWeight(first, transposed, results[-1] if prunes_output else None)

    return run


register_backend(PruneByCpp())
