"""The share of the output positions that a layer's weight gradient was computed from."""

from __future__ import annotations

from fst.backends.choice import DENSE
from fst.layers.modules import SparseLayer


def share_of_positions(layer: SparseLayer) -> float | None:
    """The share from which grad_weight was last computed; None where the strategy draws no
    positions, and before the first step.
    """
    rule, decision = layer.strategy.grad_weight, layer.state.record.decisions.get("grad_weight")
    if rule is None or not rule.samples or decision is None:
        return None
    return 1.0 if decision.backend == DENSE else rule.density
