"""SDGP: structured data gradient pruning.

Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", ICPR 2022,
Algorithm 1 and section III-B. Official code: github.com/BradMcDanel/sdgp, which leaves convolutions
with three input channels or fewer alone, as here.

What FST's "GG" adds to it can be added one by one, to find out what hurts (docs/contradiction.md):
``group_order="position"`` groups dY along the output map, ``prune_grad_weight`` prunes dY in
grad_weight too, ``prune_weight`` prunes W in output, with SR-STE's decay.
"""

from dataclasses import replace

from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.registry import grad_weight_of, register_strategy


@register_strategy("sdgp")
def sdgp(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude_rescaled",
    rescale: str | None = None,
    group_order: str = "channel",
    prune_grad_weight: bool = False,
    prune_weight: bool = False,
    decay: float | None = None,
    grad_weight: str | None = None,
) -> Strategy:
    """dX = Wᵀ·P(dY), pruned along output channels; dW and the bias gradient see the full dY.

    Args:
        rule: of dY: "magnitude_rescaled" (the paper's "Res. Mag."), "magnitude" or "random".
        rescale: over what "magnitude_rescaled" preserves the L1 norm: "sample_channel" (None; the
            published code), "channel" (the paper's text) or "group".
        prune_grad_weight: whether dY is pruned in grad_weight too.
        prune_weight: whether W is pruned in output, with SR-STE's decay.
        decay: λ of that decay, 2e-4 if None; for ``prune_weight=True`` alone.
        grad_weight: a strategy that prunes dW as well: "sampled,keep=0.25", "mvue", "fst"; None:
            dense.
    """
    if prune_grad_weight and grad_weight is not None:
        raise ValueError("prune_grad_weight=True and grad_weight exclude each other.")
    if rescale is not None and rule != "magnitude_rescaled":
        raise ValueError(f"rescale={rescale!r} needs rule='magnitude_rescaled', not {rule!r}.")
    if decay and not prune_weight:
        raise ValueError(f"decay={decay} needs prune_weight=True: dense weights have no decay.")
    rescale = "sample_channel" if rescale is None else rescale
    decay = 2e-4 if decay is None else decay
    pruned = NM("grad_output", n, m, rule=rule, rescale=rescale)
    return Strategy(
        "sdgp",
        output=NM("weight", n, m) if prune_weight else None,
        grad_input=replace(pruned, group_order=group_order),
        grad_weight=pruned if prune_grad_weight else grad_weight_of(grad_weight),
        decay=decay if prune_weight else 0.0,
        min_in_channels=4,
    )
