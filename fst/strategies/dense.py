"""Nothing is pruned or left out: the control, by the library's own products."""

from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("dense")
def dense() -> Strategy:
    """All three GEMMs dense; bit for bit what torch computes."""
    return Strategy("dense", skips_zeros=False)
