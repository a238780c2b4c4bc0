"""Nothing is pruned: the baseline, on the same path as every other strategy."""

from fst.strategies import register_strategy
from fst.strategy import Strategy


@register_strategy("dense")
def dense() -> Strategy:
    """All three GEMMs dense; bit for bit what torch computes."""
    return Strategy("dense")
