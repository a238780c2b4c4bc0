"""Nothing is pruned: the baseline, on the same path as every other strategy."""

from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("dense")
def dense() -> Strategy:
    """All three GEMMs dense; bit for bit what torch computes."""
    return Strategy("dense")
