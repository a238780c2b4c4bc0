"""ASP: the 2:4 mask of a trained dense model, kept while the model is trained again.

Paper: Mishra et al., "Accelerating Sparse Deep Neural Networks", arXiv 2104.08378 (2021): train
dense, prune once by magnitude, repeat the training. Official code: NVIDIA apex,
apex.contrib.sparsity (mask "m4n2_1d" along input channels), which masks gradients before the
optimizer's step and weights after it. Apex leaves layers out whose channels are no multiple of 16
(input) or 8 (output), in a ResNet the first one; here all convolutions are pruned, as by `fst`:
``exclude`` the first one for apex's choice. Apex prunes fully connected layers too: ask for them
with ``include`` of `fst.convert`. Newer versions permute input channels before they choose the
mask, which keeps larger weights; here they keep their order. Apex lets weights grow that are zero
when the mask is chosen; here they stay zero, so a model that was pruned before keeps its zeros.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fst.rules.nm import NM, SameAsOutput
from fst.rules.schedule import HeldMasks, Layers, Run, hold_at_zero
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@dataclass(frozen=True)
class OneShot(HeldMasks):
    """The rule's mask of the weights that training starts from, without their zeros, for good."""

    needs_trained_model: ClassVar[bool] = True

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            kept = layer.rule_mask()
            alive = kept & (layer.weight_as_conv() != 0)
            # a layer of zeros alone was not trained, and could never learn with an empty mask
            layer.set_mask(torch.where(alive.any(), alive, kept))
        hold_at_zero(layers, run)

    def __str__(self) -> str:
        return "mask of the trained model, frozen"  # in checkpoints, which compare the words


@register_strategy("asp")
def asp(n: int = 2, m: int = 4, group_order: str = "channel") -> Strategy:
    """Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, dW and momentum masked by M, which is chosen once."""
    return Strategy(
        "asp",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=SameAsOutput(),
        schedule=OneShot(),
    )
