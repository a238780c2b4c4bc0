"""Rules that prune grad_output as a whole, so that one selection serves both backward GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fst.basics.values import check_integer, check_number
from fst.rules import masks
from fst.rules.rule import Rule

LEAST_THRESHOLD = 1e-15  # halving must not end at 0, from which no doubling leads away


@dataclass(frozen=True)
class WholeGradient(Rule):
    """A rule of grad_output that keeps a share of it: the base of `TopK` and `Reuse`.

    Attributes:
        density: 0 < density <= 1.
    """

    operand: str = "grad_output"
    density: float = 0.5
    operands = ("grad_output",)
    is_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")


@dataclass(frozen=True)
class TopK(WholeGradient):
    """Keep the largest |grad_output| of each sample (meProp, Sun et al. 2017, Eq. 6 to 8).

    A sample of L = Cout·P·Q elements keeps exactly max(1, round(density·L)); ties keep the lower
    index in the order (cout, p, q).
    """

    def prune_grad_output(
        self,
        grad_output: Tensor,
        gemm: str,
        groups: int,
        generator: torch.Generator | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Tensor:
        k = max(1, round(self.density * grad_output.shape[1:].numel()))
        return masks.apply_mask(grad_output, masks.top_k_mask(grad_output, k))

    def __str__(self) -> str:
        return f"{self.operand} top {self.density:g} per sample"


@dataclass(frozen=True)
class Reuse(WholeGradient):
    """Keep what differs from the previous step's grad_output, reuse that elsewhere (ReSprop).

    Attributes:
        density: the share that is to be kept; the threshold on |difference| doubles after a step
            that kept more, and halves after one that kept less.
        threshold: where it starts, in units of grad_output.
        warmup: steps in which the share falls linearly from 1 to ``density``.
    """

    threshold: float = 1e-7
    warmup: int = 0
    has_memory = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, "(0, inf)")
        check_integer("warmup", self.warmup, 0)

    def prune_grad_output(
        self,
        grad_output: Tensor,
        gemm: str,
        groups: int,
        generator: torch.Generator | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Tensor:
        """prev + P(dY − prev): dY where it differs enough from ``prev``, else prev.

        Dense where nothing is remembered: without a ``memory``, in a layer's first step, and where
        the size, dtype or device of the output has changed. The memory holds "previous" (Cout, P,
        Q), grad_output of the first sample of the previous batch, "threshold", a scalar on the
        device, and "steps", the number of backward passes.
        """
        if memory is None or grad_output.numel() == 0:
            return grad_output
        previous, threshold = memory.get("previous"), memory.get("threshold")
        steps, result = memory.get("steps", 0), grad_output
        if threshold is None or threshold.device != grad_output.device:
            threshold = torch.full((), self.threshold, device=grad_output.device)
        if previous is not None and _fits(previous, grad_output):
            differs = ~((grad_output - previous).abs() <= threshold)  # NaN stays visible
            result = torch.where(differs, grad_output, previous)
            wanted = self.density_at(steps) * grad_output.numel()
            threshold = _adapted(threshold, differs.sum(), wanted)
        previous = grad_output[0].detach().clone()
        memory.update(previous=previous, threshold=threshold, steps=steps + 1)
        return result

    @property
    def simulation(self) -> str:
        kept = "Cout·P·Q values, a sample of the previous grad_output, for each layer and call"
        return f"{super().simulation}; keeps {kept}"

    def density_at(self, step: int) -> float:
        """The share to keep after ``step`` steps of the layer."""
        return 1 - (1 - self.density) * min(1.0, step / self.warmup if self.warmup else 1.0)

    def __str__(self) -> str:
        details = f", from threshold {self.threshold:g}"
        if self.warmup:
            details += f", {self.warmup} steps of warm-up"
        return f"{self.operand} {self.density:g} by difference from the previous step{details}"


def _fits(previous: Tensor, grad_output: Tensor) -> bool:
    return (previous.shape, previous.dtype, previous.device) == (
        grad_output.shape[1:],
        grad_output.dtype,
        grad_output.device,
    )


def _adapted(threshold: Tensor, kept: Tensor, wanted: float) -> Tensor:
    """The threshold of the next step, computed on the device."""
    factor = torch.where(kept > wanted, 2.0, torch.where(kept < wanted, 0.5, 1.0))
    return (threshold * factor).clamp(min=LEAST_THRESHOLD)
