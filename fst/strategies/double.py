"""Double pruning: grad_input prunes S(W) once more, along its own axis, with the zeros of output.

Papers: Zhang et al., "Bi-directional Masks for Efficient N:M Sparse Training", ICML 2023 (arXiv
2302.06058); Mozaffari et al., "SLoPe: Double-Pruned Sparse Plus Lazy Low-Rank Adapter Pretraining
of LLMs", 2024 (arXiv 2405.16325).
Official code: github.com/zyxxmu/Bi-Mask (CnnModels/utils/conv_type.py) and
github.com/Mohammad-Mozaffari/slope. Both multiply dX with M_b∘W, M_b = M_f ∧ S(M_f∘W along output
channels). Bi-Mask forms these groups in an order of the output channels of its own: the one of G
random permutations that leaves most weights, drawn anew every so many steps (100 and 100 in its
README); the forward groups run along im2col there (``group_order="im2col"``). SLoPe's masks stay as
they were in the first step, which is not offered here, nor are its low-rank adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fst.basics.values import check_integer
from fst.rules.masks import apply_mask
from fst.rules.nm import TwicePruned
from fst.rules.schedule import Layers, PrunedLayer, Run, Schedule


@dataclass(frozen=True)
class Reordered(Schedule):
    """Orders of the output channels in which grad_input's groups are formed (Bi-Mask).

    Attributes:
        permutations: how many random orders are compared, G.
        interval: optimizer steps between two comparisons.
    """

    permutations: int = 100
    interval: int = 100

    def __post_init__(self) -> None:
        check_integer("permutations", self.permutations, 1)
        check_integer("interval", self.interval, 1)

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return ("phase",)

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            layer.set_phase({"order": self._best(layer)})

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        if step % self.interval == 0:
            self.start(layers, run)

    def _best(self, layer: PrunedLayer) -> Tensor:
        """The order that leaves most weights, of equal ones the first; nobody waits for a GPU."""
        weight, groups = layer.weight_as_conv().detach(), layer.conv_groups
        rule, generator = layer.strategy.grad_input, layer.seeded_generator(torch.device("cpu"), 1)
        kept = apply_mask(weight, layer.rule_mask())
        drawn = [
            torch.randperm(len(weight) // groups, generator=generator, device="cpu")
            for _ in range(self.permutations)
        ]
        orders = torch.stack(drawn).to(weight.device, non_blocking=True)
        left = []
        for order in orders:
            own = replace(rule, order=order).weight_mask(kept, "grad_input", groups)
            left.append((own & (kept != 0)).sum())
        earlier = torch.arange(len(left), 0, -1, device=weight.device)
        best = (torch.stack(left) * (len(left) + 1) + earlier).argmax()
        return orders.index_select(0, best[None])[0]

    def strategy_in(self, strategy: Any, phase: Any) -> Any:
        rule: TwicePruned = replace(strategy.grad_input, order=phase["order"])
        return replace(strategy, grad_input=rule)

    def __str__(self) -> str:
        return f"the best of {self.permutations} orders every {self.interval} steps"
