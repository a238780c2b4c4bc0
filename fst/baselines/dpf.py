"""DPF: an unstructured mask that follows the dense weights, which learn from the pruned model.

Paper: Lin et al., "Dynamic Model Pruning with Feedback", ICLR 2020: Algorithm 1 with a mask every
p = 16 steps, magnitudes compared across all layers, and the cubic growth of sparsity of Zhu and
Gupta (2017, "To prune, or not to prune", Eq. 1). Here it grows from the first step on. Over which
share of the training (``ramp``) is not known from the authors: of two independent implementations
one takes 225 of 300 epochs, which is the default, and then keeps its mask; the other takes nearly
all. Here masks are refreshed to the end. FST's Table 3 has a sparsity of 50 %.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fst.basics.values import check_integer, check_number, one_of
from fst.rules import masks
from fst.rules.nm import SameAsOutput
from fst.rules.schedule import Layers, Run, Schedule
from fst.rules.strategy import Strategy
from fst.rules.weight import Unstructured
from fst.strategies.registry import register_strategy


@dataclass(frozen=True)
class GrowingSparsity(Schedule):
    """New masks at the sparsity of the moment; the weights stay dense.

    Attributes:
        interval: training steps between two masks.
        ramp: share of the training over which sparsity grows from 0 to the rule's.
        allocation: "global" compares magnitudes across layers, "uniform" within each.
    """

    interval: int = 16
    ramp: float = 0.75
    allocation: str = "global"
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, 1)
        check_number("ramp", self.ramp, "[0, 1]")
        one_of("allocation", self.allocation, ("global", "uniform"))

    def sparsity(self, goal: float, step: int, total_steps: int) -> float:
        """goal · (1 − (1 − step / (ramp · total_steps))³), goal after the ramp."""
        left = max(0.0, 1 - step / (self.ramp * total_steps)) if self.ramp else 0.0
        return goal * (1 - left**3)

    def start(self, layers: Layers, run: Run) -> None:
        self._prune(layers, run, 0)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        if step % self.interval == 0:
            self._prune(layers, run, step)

    def _prune(self, layers: Layers, run: Run, step: int) -> None:
        sparsity = self.sparsity(layers[0].strategy.output.sparsity, step, run.total_steps)
        weights = [layer.weight_as_conv().detach() for layer in layers]
        if self.allocation == "uniform":
            kept = [masks.unstructured_mask(weight, sparsity) for weight in weights]
        else:
            sizes = [weight.numel() for weight in weights]
            together = torch.cat([weight.flatten() for weight in weights])
            parts = masks.unstructured_mask(together, sparsity).split(sizes)
            kept = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        for layer, mask in zip(layers, kept, strict=True):
            layer.set_mask(mask)

    def __str__(self) -> str:
        growth = f"growing over {self.ramp:g} of the training"
        return f"{self.allocation} mask every {self.interval} steps, {growth}"


@register_strategy("dpf")
def dpf(
    sparsity: float = 0.5, interval: int = 16, ramp: float = 0.75, allocation: str = "global"
) -> Strategy:
    """Y = (M∘W)·X, dX = (M∘W)ᵀ·dY; the dense dW is applied to the dense W."""
    return Strategy(
        "dpf",
        output=Unstructured(sparsity=sparsity),
        grad_input=SameAsOutput(),
        schedule=GrowingSparsity(interval, ramp, allocation),
    )
