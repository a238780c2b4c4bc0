"""Pruning by the Triton kernels for GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends import sources
from fst.backends.registry import register_backend
from fst.ops import triton
from fst.ops.backends.prune_cpp import PruneByKernel, from_kernel
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import PrunedWeight


class PruneByTriton(PruneByKernel):
    """One launch for each operand."""

    name = "triton"
    most_m = triton.MOST_M
    computes = {
        "prune_weight": "one launch for each weight, which is read once",
        "prune_grad_output": "one read, one write; rescaling reads twice",
    }

    def missing(self) -> str:
        return sources.triton_missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, PruneWeight):
            fits = triton.takes_weight(operands.weight, operands.dtype)
            return "" if fits else "the weight is not dense in memory, or of another dtype"
        _, m, kind, rescale = operands.pattern
        if operands.across is not None:
            return "it prunes along channels alone"
        fits = triton.takes_grad_output(m, kind, rescale, operands.maps.dtype)
        return "" if fits else f"it knows no {kind} of groups of {m} in {operands.maps.dtype}"

    def useless(self, operands: PruneWeight | PruneMaps) -> str:
        return "" if operands.device.type == "cuda" else "Triton's interpreter saves no time"

    def expected(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed draws as without Triton; compiled code fuses PyTorch's operators."""
        return 0.5 if operands.draws or torch.compiler.is_compiling() else 2.0

    def prune_weight(self, operands: PruneWeight) -> PrunedWeight:
        weight, strategy, groups, dtype = operands[:4]
        patterns = strategy.weight_patterns
        assert patterns is not None  # not refused
        pruned = triton.prune_weight(weight, groups, patterns, dtype)
        return from_kernel(operands, pruned)

    def prune_grad_output(self, operands: PruneMaps) -> Tensor:
        pattern = operands.pattern
        return triton.prune_grad_output(operands.maps, *pattern, operands.groups, operands.seed())


register_backend(PruneByTriton())
