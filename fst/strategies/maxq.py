"""MaxQ: N:M weights with larger factors for those that matter along other axes.

Paper: Xiang et al., "MaxQ: Multi-Axis Query for N:M Sparsity Network", CVPR 2024 (arXiv
2312.07061). Official code: github.com/JingyangXiang/MaxQ
(models/conv_type/mullt_axis_query_v2_pro.py, whose convolutions are 1x1 and 3x3; here the places of
any larger kernel are compared). The factors have no gradient. SR-STE's decay pulls at pruned
weights. Part of the groups, those of smallest L1 norm, stay dense; their share falls from 1 to 0,
in the code from epoch to epoch, here from step to step. The code leaves the ramp to its user
(``--decay-end``); a quarter of the training, the default here, is 30 of 120 epochs. Folded weights
are multiplied by the last factors, and are n:m. The code has a batch norm of its own behind each
convolution, which is not part of this strategy.
"""

import math
from dataclasses import dataclass
from typing import Any

from fst.basics.values import check_number, one_of
from fst.rules.nm import SameAsOutput
from fst.rules.phases import Phases
from fst.rules.schedule import PrunedLayer, Run
from fst.rules.strategy import Strategy
from fst.rules.values import MultiAxis
from fst.strategies.registry import register_strategy

DECLINES = ("linear", "cubic", "cos", "exp")
STEEPNESS = 1.5  # of "exp": 0.05 for each of 30 epochs


@dataclass(frozen=True)
class FewerDenseGroups(Phases):
    """The share of dense groups falls from 1 to 0.

    Attributes:
        ramp: share of the training in which it falls.
        decline: its form.
    """

    ramp: float = 0.25
    decline: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ramp", self.ramp, "[0, 1)")
        one_of("decline", self.decline, DECLINES)

    def share(self, progress: float) -> float:
        """Share of the dense groups, for a progress of the ramp from 0 to 1."""
        if progress >= 1:
            return 0.0
        if self.decline == "cos":
            return math.cos(progress * math.pi / 2)
        if self.decline == "exp":
            return 1 - math.expm1(-STEEPNESS * progress) / math.expm1(-STEEPNESS)
        return (1 - progress) ** (3 if self.decline == "cubic" else 1)

    def pruning(self, layer: PrunedLayer, run: Run, done: int) -> dict[str, Any]:
        return {"dense_groups": self.share(self.progress(run, done, 1 - self.ramp))}

    def __str__(self) -> str:
        return f"dense groups, {self.decline} to none in {self.ramp:.4g} of the training"


@register_strategy("maxq")
def maxq(
    n: int = 2,
    m: int = 4,
    ramp: float = 0.25,
    decline: str = "linear",
    decay: float = 2e-4,
    group_order: str = "channel",
) -> Strategy:
    """Y = V·X, dX = Vᵀ·dY with V = W∘M∘(1 + F + P), straight-through dW + λ(1 − M)∘W.

    Args:
        ramp: share of the training in which the share of dense groups falls from 1 to 0.
        decline: "linear", "cubic", "cos" or "exp".
    """
    return Strategy(
        "maxq",
        output=MultiAxis("weight", n, m, group_order=group_order),
        grad_input=SameAsOutput(),
        decay=decay,
        schedule=FewerDenseGroups(ramp=ramp, decline=decline),
    )
