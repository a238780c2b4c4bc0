"""Pruning by the Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fst.backends import sources
from fst.backends.registry import NO_GAIN, register_backend
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

    def unavailable(self) -> str:
        return sources.triton_missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands) or self._refuses_form(operands):
            return reason
        on_gpu = operands.device.type == "cuda"
        return "" if on_gpu else f"{NO_GAIN}Triton's interpreter saves no time"

    def _refuses_form(self, operands: PruneWeight | PruneMaps) -> str:
        if isinstance(operands, PruneWeight):
            fits = triton.takes_weight(operands.weight, operands.dtype)
            return "" if fits else "the weight is not dense in memory, or of another dtype"
        _, m, kind, rescale = operands.pattern
        if operands.across is not None:
            return "it prunes along channels alone"
        fits = triton.takes_grad_output(m, kind, rescale, operands.maps.dtype)
        return "" if fits else f"it knows no {kind} of groups of {m} in {operands.maps.dtype}"

    def cost(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed draws as without Triton; compiled code fuses PyTorch's operators."""
        return 2.0 if operands.draws or torch.compiler.is_compiling() else 0.5

    def prune_weight(self, operands: PruneWeight) -> Callable[[PruneWeight], PrunedWeight]:
        groups, dtype, patterns = operands.groups, operands.dtype, operands.strategy.weight_patterns
        assert patterns is not None  # not refused
        return from_kernel(
            operands, lambda weight: triton.prune_weight(weight, groups, patterns, dtype)
        )

    def prune_grad_output(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        pattern, groups = operands.pattern, operands.groups
        return lambda o: triton.prune_grad_output(o.maps, *pattern, groups, o.seed())


register_backend(PruneByTriton())
