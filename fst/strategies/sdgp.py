"""SDGP: structured data gradient pruning.

Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", ICPR 2022,
Algorithm 1 and section III-B. Official code: github.com/BradMcDanel/sdgp, which leaves convolutions
with three input channels or fewer alone, as here.

What FST's "GG" adds to it can be added one by one, to find out what hurts (docs/contradiction.md):
``group_order="position"`` groups dY along the output map, ``prune_grad_weight`` prunes dY in
grad_weight too, ``prune_weight`` prunes W in output, with SR-STE's decay.
"""

from dataclasses import replace
from typing import Any

from fst.rules.by_name import grad_weight_rule
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("sdgp")
def sdgp(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude_rescaled",
    rescale: str = "sample_channel",
    group_order: str = "channel",
    prune_grad_weight: bool = False,
    prune_weight: bool = False,
    decay: float = 2e-4,
    grad_weight: dict[str, Any] | None = None,
) -> Strategy:
    """dX = Wᵀ·P(dY), pruned along output channels; dW and the bias gradient see the full dY.

    ``grad_weight`` prunes dW too: ``{"rule": "sampled", ...}`` or ``"bands"`` with their options.
    """
    if prune_grad_weight and grad_weight is not None:
        raise ValueError("prune_grad_weight=True and grad_weight exclude each other.")
    pruned = NM("grad_output", n, m, rule=rule, rescale=rescale)
    return Strategy(
        "sdgp",
        output=NM("weight", n, m) if prune_weight else None,
        grad_input=replace(pruned, group_order=group_order),
        grad_weight=pruned if prune_grad_weight else grad_weight_rule(grad_weight),
        decay=decay if prune_weight else 0.0,
        min_in_channels=4,
    )
