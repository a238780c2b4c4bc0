"""MVUE: grad_output pruned to N:M in grad_weight, exact in the mean, with the least variance.

Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023
(arXiv 2203.10991). Its own repository (brianchmiel/Act-and-Grad-structured-sparsity) holds no code;
the code in the paper's supplement was not read. The draw that others run for 2:4, "approx-MVUE", is
in github.com/huyz2023/2by4-pretrain, sparse/utils.py: ``approximate=True``. Here the default is
exact for every n:m: inclusion probabilities are those of least variance, the draw is systematic.

Groups run along the output positions, grad_weight's reduction axis, for each sample and output
channel.
"""

from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


def unbiased(n: int, m: int, approximate: bool = False) -> NM:
    """The rule of grad_output in grad_weight."""
    if approximate and (n, m) != (2, 4):
        raise ValueError(f"approximate=True is defined for 2:4, not for n={n}, m={m}.")
    return NM("grad_output", n, m, rule="mvue_approximate" if approximate else "mvue")


@register_strategy("mvue")
def mvue(n: int = 2, m: int = 4, approximate: bool = False) -> Strategy:
    """Y = W·X, dX = Wᵀ·dY, dW = P(dY)·Xᵀ with E[P(dY)] = dY."""
    return Strategy("mvue", grad_weight=unbiased(n, m, approximate))
