"""SdGf and MdGf: the pattern reaches N:M step by step, or pruned weights count less and less.

Papers: Kao et al., "Training Recipe for N:M Structured Sparsity with Decaying Pruning Mask", 2022
(arXiv 2209.07617); Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity Training
in Transformers", CPAL 2025 (arXiv 2402.04744). Official code:
github.com/abhibambhaniya/progressive_gradient_flow_nm_sparsity
(timm/sparse_pruning/sparse_functions.py).

The frames between ``dense_start`` and ``settled``, the fine-tuning at n:m in the end, are equally
long. "stepwise" (the code's "sparsify") has m−1:m, m/2:m, m/4:m, ... n:m; where m/n is no power of
two the code never reaches n:m, and here the last frame is n:m. "geometric" (its "fine") has 8n:8m,
4n:4m, 2n:2m, n:m: one density, ever smaller groups, which need 8m <= 32 here. MdGf multiplies the
pruned weights by γ, which falls from 1 to 0 until the fine-tuning begins: "linear", or as
exp(−5·progress), whose last value 0.0067 ends at 0 too. The official code takes γ's
rate as an option for each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fst.basics.values import check_number, one_of
from fst.rules.masks import MAX_M
from fst.rules.nm import NM, SameAsOutput
from fst.rules.phases import Phases
from fst.rules.schedule import Layers, PrunedLayer, Run
from fst.rules.strategy import Strategy
from fst.rules.values import Fading
from fst.strategies.registry import register_strategy

STRUCTURES = ("stepwise", "geometric")
DECLINES = ("linear", "exponential")
GEOMETRIC_FRAMES = 4
STEEPNESS = 5.0  # of the exponential decline


def frames(n: int, m: int, structure: str) -> list[tuple[int, int]]:
    """The patterns of SdGf in their order; the last one is (n, m)."""
    if structure == "geometric":
        factors = [2**power for power in reversed(range(GEOMETRIC_FRAMES))]
        return [(n * factor, m * factor) for factor in factors]
    halves = [m // 2**power for power in range(1, m.bit_length())]
    return [(k, m) for k in dict.fromkeys([m - 1, *halves]) if k > n] + [(n, m)]


def check_frames(rule: NM, structure: str) -> None:
    """Raise ValueError where a frame on the way to the rule's n:m has too large groups."""
    most = max(size for _, size in frames(rule.n, rule.m, structure))
    if most > MAX_M:
        raise ValueError(
            f"structure={structure!r} begins with groups of {most}, for m={rule.m}; at most "
            f"{MAX_M} are possible, so m <= {MAX_M // 2 ** (GEOMETRIC_FRAMES - 1)}."
        )


@dataclass(frozen=True)
class Settling(Phases):
    """Dense, then a way to N:M, which is reached for the rest of the training.

    Attributes:
        settled: share of the training that ends it at N:M.
    """

    settled: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("settled", self.settled, "[0, 1)")
        if self.dense_start + self.settled >= 1:
            raise ValueError(
                f"dense_start={self.dense_start} and settled={self.settled} leave no step on the "
                "way to n:m: their sum must be below 1."
            )

    def __str__(self) -> str:
        return f"{super().__str__()}, n:m for the last {self.settled:.4g}"


@dataclass(frozen=True)
class DecayingPattern(Settling):
    """Frames of equal length, each with a pattern of its own."""

    structure: str = "stepwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("structure", self.structure, STRUCTURES)

    def attached(self, layers: Layers, run: Run) -> None:
        super().attached(layers, run)
        rule = layers[0].strategy.output
        check_frames(rule, self.structure)
        count, steps = len(frames(rule.n, rule.m, self.structure)), self.length(run, self.settled)
        if steps < count:
            raise ValueError(
                f"total_steps={run.total_steps}: {count} frames on the way to {rule.n}:{rule.m} "
                f"need as many steps, but dense_start={self.dense_start} and settled="
                f"{self.settled} leave {steps}."
            )

    def pruning(self, layer: PrunedLayer, run: Run, done: int) -> dict[str, Any]:
        rule = layer.strategy.output
        patterns = frames(rule.n, rule.m, self.structure)
        index = int(self.progress(run, done, self.settled) * len(patterns) + 1e-9)
        n, m = patterns[min(index, len(patterns) - 1)]
        return {"n": n, "m": m}

    def __str__(self) -> str:
        return f"{self.structure} patterns, {super().__str__()}"


@dataclass(frozen=True)
class DecayingRest(Settling):
    """The factor of pruned weights falls from 1 to 0."""

    decline: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("decline", self.decline, DECLINES)

    def pruning(self, layer: PrunedLayer, run: Run, done: int) -> dict[str, Any]:
        progress = self.progress(run, done, self.settled)
        rest = 1 - progress
        if self.decline == "exponential" and progress < 1:
            rest = math.exp(-STEEPNESS * progress)
        return {"rest": rest}

    def __str__(self) -> str:
        return f"{self.decline} decline, {super().__str__()}"


@register_strategy("sdgf")
def sdgf(
    n: int = 2,
    m: int = 4,
    structure: str = "stepwise",
    dense_start: float = 0.0,
    settled: float = 0.1,
    group_order: str = "channel",
) -> Strategy:
    """Y = S_t(W)·X, dX = S_t(W)ᵀ·dY, straight-through dW; S_t keeps ever fewer weights.

    Args:
        structure: "stepwise" or "geometric".
        dense_start: share of the training before the first frame.
        settled: share of the training, the last one, beside the last frame, at n:m.
    """
    one_of("structure", structure, STRUCTURES)
    rule = NM("weight", n, m, group_order=group_order)
    check_frames(rule, structure)
    schedule = DecayingPattern(dense_start, 0.0, settled, structure)
    return Strategy("sdgf", output=rule, grad_input=SameAsOutput(), schedule=schedule)


@register_strategy("mdgf")
def mdgf(
    n: int = 2,
    m: int = 4,
    decline: str = "linear",
    dense_start: float = 0.0,
    settled: float = 0.1,
    group_order: str = "channel",
) -> Strategy:
    """Y = V·X, dX = Vᵀ·dY with V = W∘(M + γ(1 − M)), straight-through dW; γ falls from 1 to 0.

    Args:
        decline: of γ, "linear" or "exponential".
        dense_start: share of the training before it.
        settled: share of the training, the last one, with γ = 0.
    """
    schedule = DecayingRest(dense_start, 0.0, settled, decline)
    rule = Fading("weight", n, m, group_order=group_order)
    return Strategy("mdgf", output=rule, grad_input=SameAsOutput(), schedule=schedule)
