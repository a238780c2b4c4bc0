"""ReSprop: output gradients are reused from the previous step except where they differ much.

Paper: Goli and Aamodt, "ReSprop: Reuse Sparsified Backpropagation", CVPR 2020. Official code:
github.com/negargoli/ReSprop. As there:

- What is reused is one sample of the previous batch, the same for all samples of this one, so that
  its part of both products costs 1/N of a dense one (and the size of a batch may change).
- What is kept of the difference is above a threshold of each layer, which starts at 1e-7 and
  doubles or halves after each step, towards the share ``density``. The bias gradient is dense.
- Warm-up (W-ReSprop): the share falls to ``density`` over the first steps. The code falls by 10 %
  per epoch after two dense ones; here it falls linearly over ``warmup`` steps.

Differences: the code draws the sample at random, here it is the first of the batch (batches are
shuffled); it adds 5 % to the share; it is dense in the first and last step of each epoch, here only
where nothing is remembered. The n-th call of a layer in a step continues the n-th of the step
before. Layers whose weight needs no gradient are dense, and so is eval mode. With a `GradScaler`
gradients are remembered as scaled: a change of the scale looks like a difference. Each rank of a
distributed run remembers its own (the engine's checkpoints hold all). Memory: Cout·P·Q values per
layer and call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fst.basics.values import check_integer, check_number
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

LEAST_THRESHOLD = 1e-15  # halving must not end at 0, from which no doubling leads away


@dataclass(frozen=True)
class Reuse(Rule):
    """Keep what differs from the previous step's grad_output, reuse that elsewhere (ReSprop).

    Attributes:
        density: the share that is to be kept; the threshold on |difference| doubles after a step
            that kept more, and halves after one that kept less.
        threshold: where it starts, in units of grad_output.
        warmup: steps in which the share falls linearly from 1 to ``density``.
    """

    operand: str = "grad_output"
    density: float = 0.5
    threshold: float = 1e-7
    warmup: int = 0
    operands = ("grad_output",)
    is_whole = True
    has_memory = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")
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


@register_strategy("resprop")
def resprop(density: float = 0.5, threshold: float = 1e-7, warmup: int = 0) -> Strategy:
    """dX = Wᵀ·R(dY), dW = R(dY)·Xᵀ with R(dY) = prev + P(dY − prev)."""
    rule = Reuse(density=density, threshold=threshold, warmup=warmup)
    return Strategy("resprop", grad_input=rule, grad_weight=rule)
