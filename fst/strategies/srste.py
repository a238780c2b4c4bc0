"""SR-STE: N:M weights learnt from scratch in the forward pass.

Paper: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
ICLR 2021, Eq. 9. Official code: github.com/NM-sparsity/NM-sparsity (its autograd function adds the
decay to the gradient; here the optimizer's step adds it).
"""

from fst.basics.values import one_of
from fst.rules.nm import NM, SameAsOutput
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

BACKWARD = ("pruned", "dense")


@register_strategy("srste")
def srste(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude",
    backward: str = "pruned",
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """Y = S(W)·X, dX = S(W)ᵀ·dY, dW dense + λ(W − S(W)).

    ``backward`` names the weight of dX. "pruned" is S(W)ᵀ, the derivative of Y, as in the official
    code. Its groups do not run along dX's reduction axis, so no sparse hardware computes it, and
    FST's Table 3 counts it as dense. "dense" is Wᵀ. Layers add the decay where the optimizer steps;
    `torch.autograd.grad` returns dW without the decay.
    """
    one_of("backward", backward, BACKWARD)
    return Strategy(
        "srste",
        output=NM("weight", n, m, rule=rule, group_order=group_order),
        grad_input=SameAsOutput() if backward == "pruned" else None,
        decay=decay,
        decay_mode=decay_mode,
    )
