"""How many positions keep a promise of noise.

A draw adds at most  spread · Σ_i (1/π_i − 1) ‖dY_i‖²  to the variance of dW, where spread is the
mean of ‖X̃_col‖² over the positions. The gradients of the two halves of each batch tell what the
variance of dW between batches is: the square of their difference, in the mean.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fst.rules.sampled import Positions

MOST_SCORES = 8192  # that are sorted to find a number of positions
NEW = 0.1  # what a step counts in the variance that is remembered


def spread_of_columns(input: Tensor, weight: Tensor, center: bool) -> float:
    """The mean of ‖X̃_col‖² over the positions, padding left out, from some of the samples."""
    some = input[: max(1, input.shape[0] // 8)]
    wide = torch.promote_types(some.dtype, torch.float32)
    if center:
        per_channel = some.to(wide).var((0, 2, 3), correction=0)
    else:
        per_channel = some.to(wide).square().mean((0, 2, 3))
    groups = input.shape[1] // weight.shape[1]
    return float(per_channel.sum()) / groups * math.prod(weight.shape[2:])


def allowed(memory: dict[str, Any], noise: float, spread: float) -> float:
    """Σ (1/π_i − 1) ‖dY_i‖² that the promise allows; 0 before anything was learned."""
    return noise * memory.get("variance", 0.0) / spread if spread > 0 else 0.0


def count(scores: Tensor, allowed: float) -> int:
    """The least number of positions of which a draw adds at most ``allowed``.

    With the k largest scores drawn for sure and π = c·s for the others, Σ s/c − s² over the others
    is what is added: c follows, and k is the first for which c·s is at most 1.
    """
    total = len(scores)
    step = -(-total // MOST_SCORES)
    falling = scores[::step].to(torch.float64).sort(descending=True).values
    if not allowed > 0 or not bool(falling.isfinite().all()):
        return total
    rest = falling.flip(0).cumsum(0).flip(0)
    squares = falling.square().flip(0).cumsum(0).flip(0)
    budget = allowed / step
    fits = rest * falling <= budget + squares
    if not bool(fits.any()):
        return total
    sure = int(fits.to(torch.int8).argmax())
    drawn = float(rest[sure] ** 2 / (budget + squares[sure]))
    return min(total, max(1, math.ceil((sure + drawn) * step)))


def of_draw(drawn: Positions, scores: Tensor) -> float:
    """An unbiased estimate of Σ (1/π_i − 1) ‖dY_i‖² from the positions that were drawn."""
    weight = drawn.weight.to(torch.float64)
    return float((weight * (weight - 1) * scores[drawn.places].to(torch.float64).square()).sum())


def learn(memory: dict[str, Any], first: Tensor, second: Tensor) -> None:
    """Take up what the gradients of the batch's halves say of the variance between batches."""
    wide = torch.promote_types(first.dtype, torch.float32)
    between = float((first.to(wide) - second.to(wide)).square().sum()) - memory["added"]
    if math.isfinite(between):
        known = memory.get("variance")
        between = max(between, 0.0)
        memory["variance"] = between if known is None else (1 - NEW) * known + NEW * between


def eighths(share: float) -> int:
    """``share`` in eighths, rounded up: backends are timed once for each."""
    return math.ceil(share * 8)
