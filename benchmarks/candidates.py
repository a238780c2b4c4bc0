"""Backward passes that `sampled` is compared with: strategies of their own, outside the package.

A config uses them by `custom_imports=dict(imports=["benchmarks.candidates"])`, in a process that
finds this folder: `python -m fst ...` in the repository's root. Each draws a share of the output
positions for dW, centred as `sampled` does, and is exact in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fst import Strategy, register_strategy
from fst.rules.alternating import Alternating
from fst.rules.sampled import Positions, Sampled


@dataclass(frozen=True)
class _Other(Sampled):
    """`Sampled` with other probabilities."""

    def __str__(self) -> str:
        return f"{super().__str__()}, {type(self).__name__}"


@dataclass(frozen=True)
class ByBoth(_Other):
    """A position is drawn by ‖dY‖·‖X_col‖: the least bound of the variance, and one more pass over
    X. Scores of this form are VCAS's (Wang et al., ICLR 2024).
    """

    def scores(
        self, grad_output: Tensor, column_norms: Callable[[], Tensor] | None = None
    ) -> Tensor:
        if column_norms is None:
            raise ValueError("ByBoth needs the input, which no grad_weight has saved.")
        return super().scores(grad_output) * column_norms()


@dataclass(frozen=True)
class Samples(_Other):
    """Whole samples, each as probable as any other: ⌈keep·N⌉ of N."""

    def scores(
        self, grad_output: Tensor, column_norms: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """The number of the sample that a position belongs to."""
        count, _, *size = grad_output.shape
        samples = torch.arange(count, device=grad_output.device, dtype=_wide(grad_output))
        return samples.repeat_interleave(math.prod(size))

    def choose(self, scores: Tensor, count: int, start: Tensor) -> Positions:
        samples = int(scores[-1]) + 1
        drawn = math.ceil(self.density * samples)
        ends = torch.arange(samples + 1, dtype=torch.float64) * drawn / samples + start.cpu()
        kept = (ends.floor().diff() > 0).to(scores.device)
        return _all_of(kept[scores.long()], samples / drawn, scores)


@dataclass(frozen=True)
class Checkerboard(_Other):
    """The even or the odd fields of a checkerboard, whose colours change from sample to sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep != 0.5:
            raise ValueError(f"keep={self.keep!r}: a checkerboard keeps 0.5.")

    def scores(
        self, grad_output: Tensor, column_norms: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """0 or 1: the colour of a position."""
        count, _, height, width = grad_output.shape
        steps = [torch.arange(n, device=grad_output.device) for n in (count, height, width)]
        places = steps[0][:, None, None] + steps[1][:, None] + steps[2]
        return (places % 2).flatten().to(_wide(grad_output))

    def choose(self, scores: Tensor, count: int, start: Tensor) -> Positions:
        return _all_of(scores == int(start >= 0.5), 2.0, scores)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _all_of(mask: Tensor, weight: float, scores: Tensor) -> Positions:
    places = mask.nonzero()[:, 0].to(torch.int32)
    return Positions(places, scores.new_full((len(places),), weight))


@register_strategy("by_both")
def by_both(keep: float = 0.5, center: bool = True) -> Strategy:
    """Dense, but dW from positions that are drawn by ‖dY‖·‖X_col‖."""
    return Strategy("by_both", grad_weight=ByBoth(keep=keep, center=center))


@register_strategy("samples")
def samples(keep: float = 0.5, center: bool = True) -> Strategy:
    """Dense, but dW from a share of the batch's samples."""
    return Strategy("samples", grad_weight=Samples(keep=keep, center=center))


@register_strategy("checkerboard")
def checkerboard(center: bool = True) -> Strategy:
    """Dense, but dW from every other position, whatever its gradient."""
    return Strategy("checkerboard", grad_weight=Checkerboard(center=center))


@register_strategy("eq10")
def eq10() -> Strategy:
    """Dense, but dW by FST's pair sums (Eq. 10), which are biased."""
    return Strategy("eq10", grad_weight=Alternating())
