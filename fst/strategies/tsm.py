"""TSM: one transposable mask for the forward and the backward pass.

Paper: Hubara et al., "Accelerated Sparse Neural Training: A Provable and Efficient Method to Find
N:M Transposable Masks", NeurIPS 2021.
Official code: github.com/papers-submission/structured_transposable_masks.
"""

from fst.rules.nm import Transposable
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("tsm")
def tsm(n: int = 2, m: int = 4, interval: int = 40, group_order: str = "channel") -> Strategy:
    """Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, straight-through dW; M is searched every ``interval`` steps."""
    mask = Transposable(n=n, m=m, interval=interval, group_order=group_order)
    return Strategy("tsm", output=mask, grad_input=mask)
