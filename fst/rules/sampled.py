"""Backward passes from some of the output positions, drawn by importance, exact in the mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from fst.basics.values import check_number, one_of
from fst.rules.rule import Rule

UNIT = 2**31  # a probability of 1, in the integers that a draw counts with
LEAST_SCORE = 2**-20  # of the mean score: what a position with a score of 0 is drawn by


class Positions(NamedTuple):
    """Some output positions of a batch.

    Attributes:
        places: (n,) int32, ascending: (sample · P + row) · Q + column in (N, Cout, P, Q).
        weight: (n,) what grad_output is multiplied by there, 1 / probability of being drawn.
    """

    places: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Sampled(Rule):
    """Multiply with grad_output at some positions only, which its own size there chooses.

    A position is drawn with a probability π proportional to ‖dY‖₂ over the channels (1 at most),
    over the whole batch, and what is drawn counts 1/π times: the mean over draws is the exact
    gradient. In grad_weight the drawn positions may see X − μ, μ the mean of X per channel: what μ
    contributes, (Σ dY)·μᵀ, is computed exactly, and the draw's variance shrinks.

    Attributes:
        keep: the share of the positions that is drawn, in (0, 1].
        center: whether X is centred in grad_weight.
    """

    operand: str = "grad_output"
    keep: float = 0.5
    center: bool = True
    operands = ("grad_output",)
    samples = True
    is_random = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("center", self.center, (True, False))
        check_number("keep", self.keep, "(0, 1]")

    def scores(
        self, grad_output: Tensor, column_norms: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """(N·P·Q,) what the probability of each position is proportional to.

        Args:
            column_norms: computes ‖X_col‖₂ of each position, (N·P·Q,), of X − μ where the rule
                centres; None where the input is not at hand, as in grad_input alone.
        """
        wide = torch.promote_types(grad_output.dtype, torch.float32)
        return torch.linalg.vector_norm(grad_output, dim=1, dtype=wide).flatten()

    def choose(self, scores: Tensor, count: int, start: Tensor) -> Positions:
        """Draw ``count`` positions systematically: evenly spread in the order of the positions.

        Each position is an interval as long as its probability, one behind the other. A position is
        drawn if its interval holds one of ``count`` points 1 apart, the first at ``start``.
        Lengths are integers in units of 2⁻³¹, so a position's probability is exactly its length.

        Args:
            scores: (M,) >= 0. Positions of infinite or undefined score are drawn for sure.
            count: 0 <= count <= M.
            start: (), float64, in [0, 1).
        """
        if count >= len(scores):
            index = torch.arange(len(scores), dtype=torch.int32, device=scores.device)
            return Positions(index, torch.ones_like(scores))
        lengths = _lengths(scores, count)
        ends = lengths.cumsum(0)
        first = (start.to(scores.device) * UNIT).to(torch.int64)
        points = torch.arange(count, device=scores.device) * UNIT + first
        index = torch.searchsorted(ends, points, right=True)
        weight = UNIT / lengths[index].to(torch.float64)
        return Positions(index.to(torch.int32), weight.to(scores.dtype))

    def draw_start(
        self, generator: torch.Generator | None, seed: int | None, device: torch.device
    ) -> Tensor:
        if seed is not None:
            return torch.tensor(seed % UNIT / UNIT, dtype=torch.float64)
        on = device if generator is None else generator.device
        return torch.rand((), generator=generator, dtype=torch.float64, device=on)

    @property
    def density(self) -> float:
        return float(self.keep)

    def __str__(self) -> str:
        centred = "centred" if self.center else "not centred"
        return f"{self.operand} sampled by importance, keep {self.keep:g}, {centred}"


def samples(rule: Rule | None) -> TypeGuard[Sampled]:
    """True for a rule that draws output positions."""
    return rule is not None and rule.samples


def _lengths(scores: Tensor, count: int) -> Tensor:
    """(M,) int64 the probability of each position, in units of 1/`UNIT`; their sum is ``count``.

    Proportional to the scores, but 1 at most: the positions of the largest scores are set aside,
    as many as would exceed 1, and the others share what is left.
    """
    wild = ~scores.isfinite()
    wild &= wild.cumsum(0) <= count
    wide = scores.to(torch.float64).masked_fill(~scores.isfinite(), 0)
    tame = wide + wide.mean() * LEAST_SCORE
    tame = torch.where(wide.sum() > 0, tame, torch.ones_like(tame)).masked_fill(wild, 0)
    left = count - wild.sum()
    falling = tame.sort(descending=True).values
    # rest[k]: the sum of all scores but the k largest
    rest = falling.flip(0).cumsum(0).flip(0)
    order = torch.arange(len(scores), device=scores.device)
    places = left - order
    exceeds = (falling * places >= rest) & (places > 0) & (falling > 0)
    aside = exceeds.cumprod(0).sum()
    least = falling.masked_fill(order >= aside, math.inf).amin()
    sure = (tame >= least) & ~wild
    # of equal scores at the limit, all or the first ones
    sure &= sure.cumsum(0) <= aside
    ends = tame.masked_fill(sure, 0).cumsum(0)
    total = (left - aside) * UNIT
    scaled = (ends * (total / ends[-1].clamp(min=1e-300))).floor().to(torch.int64).minimum(total)
    scaled = torch.where(ends >= ends[-1], total, scaled)
    return scaled.diff(prepend=scaled.new_zeros(1)) + (sure | wild) * UNIT
