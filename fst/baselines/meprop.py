"""meProp: only the largest output gradients are propagated.

Paper: Sun et al., "meProp: Sparsified Back Propagation for Accelerated Deep Learning with Reduced
Overfitting", ICML 2017, Eq. 6 to 8, written for fully connected layers: top-k of each example's
output gradient, used for the gradients of the weight and of the input. Official code:
github.com/lancopku/meProp, where the bias gradient sees the full dY; so it does here. For a
convolution a sample's gradient is its whole (Cout, P, Q) map, of which k is a share: 50 % in FST's
Table 3 (the paper's own k, 4 to 16 % of a layer, was for perceptrons).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fst.basics.values import check_number
from fst.rules import masks
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@dataclass(frozen=True)
class TopK(Rule):
    """Keep the largest |grad_output| of each sample (meProp, Sun et al. 2017, Eq. 6 to 8).

    A sample of L = Cout·P·Q elements keeps exactly max(1, round(density·L)); ties keep the lower
    index in the order (cout, p, q).

    Attributes:
        density: 0 < density <= 1.
    """

    operand: str = "grad_output"
    density: float = 0.5
    operands = ("grad_output",)
    is_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")

    def prune_grad_output(
        self,
        grad_output: Tensor,
        gemm: str,
        groups: int,
        generator: torch.Generator | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Tensor:
        k = max(1, round(self.density * grad_output.shape[1:].numel()))
        return masks.apply_mask(grad_output, masks.top_k_mask(grad_output, k))

    def __str__(self) -> str:
        return f"{self.operand} top {self.density:g} per sample"


@register_strategy("meprop")
def meprop(density: float = 0.5) -> Strategy:
    """dX = Wᵀ·T(dY), dW = T(dY)·Xᵀ, T being the top ``density`` of each sample, selected once."""
    rule = TopK(density=density)
    return Strategy("meprop", grad_input=rule, grad_weight=rule)
