"""What the rule `Reuse` keeps from one backward pass to the next, and what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fst.rules.gradient import Reuse

LEAST_THRESHOLD = 1e-15  # halving must not end at 0, from which no doubling leads away


@dataclass
class ReuseMemory:
    """State of one call of a layer: Cout·P·Q values and two numbers.

    Attributes:
        previous: grad_output (Cout, P, Q) of the first sample of the previous batch.
        threshold: scalar tensor, the least |difference| that is kept.
        steps: backward passes seen.
    """

    previous: Tensor | None = None
    threshold: Tensor | None = None
    steps: int = 0

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "previous": None if self.previous is None else self.previous.cpu(),
            "threshold": None if self.threshold is None else self.threshold.cpu(),
            "steps": self.steps,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device) -> ReuseMemory:
        """What `state` returned, on ``device``."""
        tensors = (state["previous"], state["threshold"])
        return cls(*(None if t is None else t.to(device) for t in tensors), state["steps"])


def reuse_grad_output(grad_output: Tensor, rule: Reuse, memory: ReuseMemory | None) -> Tensor:
    """prev + P(dY − prev): dY (N, Cout, P, Q) where it differs enough from ``prev``, else prev.

    Dense where nothing is remembered: without a memory, in a layer's first step, and where the
    size, dtype or device of the output has changed.
    """
    if memory is None or grad_output.numel() == 0:
        return grad_output
    previous, result = memory.previous, grad_output
    if memory.threshold is None or memory.threshold.device != grad_output.device:
        memory.threshold = torch.full((), rule.threshold, device=grad_output.device)
    if previous is not None and _fits(previous, grad_output):
        differs = ~((grad_output - previous).abs() <= memory.threshold)  # NaN stays visible
        result = torch.where(differs, grad_output, previous)
        wanted = rule.density_at(memory.steps) * grad_output.numel()
        memory.threshold = _adapted(memory.threshold, differs.sum(), wanted)
    memory.previous = grad_output[0].detach().clone()
    memory.steps += 1
    return result


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
