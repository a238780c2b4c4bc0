"""What share of the output positions a layer's weight gradient was computed from."""

from __future__ import annotations

from fst.layers.modules import SparseLayer
from fst.ops.positions.sampled import EXACT


def share_of_positions(layer: SparseLayer) -> float | None:
    """The share from which grad_weight was last computed; None where the strategy draws no
    positions, and before the first step.
    """
    rule, decision = layer.strategy.grad_weight, layer.passing.decisions.get("grad_weight")
    if rule is None or not rule.samples or decision is None:
        return None
    return 1.0 if decision.backend == EXACT else rule.density
