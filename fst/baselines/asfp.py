"""ASFP: filters are zeroed after each epoch and go on learning; ever more of them are.

Paper: He et al., "Asymptotic Soft Filter Pruning for Deep Convolutional Neural Networks", IEEE
Transactions on Cybernetics 2019 (arXiv 1808.07471): Algorithm 1, and the exponential rate through
(0, 0), (N/8, 3/4 of the goal) and (N, goal) for N epochs. The authors' code of the fixed-rate
version: github.com/he-y/soft-filter-pruning; that of ASFP was announced there, not published.

The filters of smallest L2 norm of each layer are zeroed when an epoch's last step is done, before
validation. Biases and batch norms stay, as in the published code. The GEMMs see the weight as it
is; after the last epoch the zeroed filters are the ones that a compact model leaves out.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from fst.basics.values import check_number
from fst.rules import masks
from fst.rules.schedule import Layers, Run, Schedule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

KNEE = (1 / 8, 3 / 4)


def asymptotic_rate(goal: float, progress: float) -> float:
    """goal · (1 − x^progress)/(1 − x), with x such that 3/4 of it is reached at progress 1/8.

    ``progress`` is the share of all epochs that is done. It is a·exp(−k·epoch) + b of the paper.
    """
    time, share = KNEE
    low, high = 0.0, 0.5  # the solution besides x = 1 of (1 - x^time)/(1 - x) = share
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if 1 - x**time > share * (1 - x) else (low, x)
    return goal * (1 - low ** min(progress, 1.0)) / (1 - low)


@dataclass(frozen=True)
class SoftFilters(Schedule):
    """Zeroes filters after each epoch.

    Attributes:
        goal: share of each layer's filters that is zeroed after the last epoch.
    """

    goal: float = 0.3
    needs: ClassVar[tuple[str, ...]] = ("total_steps", "steps_per_epoch")

    def __post_init__(self) -> None:
        check_number("goal", self.goal, "[0, 1)")

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        total, per_epoch = run.total_steps, run.steps_per_epoch
        done = int(step / per_epoch + 1e-6)
        if step >= total:
            done = max(done, math.ceil(total / per_epoch - 1e-6))
        if all(layer.state.schedule_state.get("epochs", 0) == done for layer in layers):
            return
        rate = asymptotic_rate(self.goal, done * per_epoch / total)
        for layer in layers:
            layer.state.schedule_state["epochs"] = done
            filters = layer.weight_as_conv().detach().flatten(1)
            kept = masks.largest_mask(filters.norm(dim=1), len(filters) - int(rate * len(filters)))
            layer.weight.mul_(layer.shaped_as_weight(kept[:, None].expand_as(filters)))

    def __str__(self) -> str:
        return f"filters zeroed after each epoch, {self.goal:g} in the end"


@register_strategy("asfp")
def asfp(goal: float = 0.3) -> Strategy:
    """All GEMMs dense; after each epoch the filters of smallest norm start anew from zero."""
    return Strategy("asfp", schedule=SoftFilters(goal))
