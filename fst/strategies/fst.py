"""FST: all three GEMMs of training 2:4 sparse.

Paper: Xu et al., "Towards Fully Sparse Training: Information Restoration with Spatial Similarity",
AAAI 2022: Eq. 5 (output), S(Wᵀ) pruned separately (grad_input), Eq. 7 and 10 (grad_weight), Eq. 6
(SR-STE decay). All convolutions are pruned, the first one too; fully connected layers stay dense.
"""

from dataclasses import replace
from typing import Any

from fst.rules.alternating import Alternating
from fst.rules.by_name import grad_weight_rule
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("fst_w")
def fst_w(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
    grad_weight: dict[str, Any] | None = None,
) -> Strategy:
    """Y = S(W)·X, dX = S(Wᵀ)·dY, dW dense + λ(W − S(W)) (the "50%×2" rows of Table 3).

    ``grad_weight`` prunes dW too: ``{"rule": "sampled", ...}`` or ``"bands"`` with their options.

    Layers add the decay where the optimizer steps; `torch.autograd.grad` returns dW without it.
    """
    return Strategy(
        "fst_w",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=NM("weight", n, m),
        grad_weight=grad_weight_rule(grad_weight),
        decay=decay,
        decay_mode=decay_mode,
    )


@register_strategy("fst")
def fst(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    pairing: str = "row",
    phase: int | str = 0,
    block: tuple[int, int] = (1, 2),
    restore: bool = True,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """`fst_w` with dW = (dY + dY·T)·S(Xᵀ) + λ(W − S(W)) (the "50%×3" rows of Table 3).

    Layers add the decay where the optimizer steps; `torch.autograd.grad` returns dW without it.
    """
    grad_weight = Alternating(pairing=pairing, phase=phase, block=block, restore=restore)
    base = fst_w(n, m, group_order, decay, decay_mode)
    return replace(base, name="fst", grad_weight=grad_weight)
