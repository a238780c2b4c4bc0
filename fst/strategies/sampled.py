"""A cheaper backward pass that is exact in the mean: few output positions, chosen by importance.

Not of a paper. FST (Xu et al., AAAI 2022) sums pairs of grad_output and drops every other column of
X (Eq. 10), which filters the weight gradient along one axis. Here the positions with a large
grad_output are drawn instead (`fst.rules.sampled`); docs/weight_gradient.md derives the estimator
and compares. VCAS (Wang et al., ICLR 2024) samples tokens for linear layers in the same spirit.
"""

from dataclasses import replace

from fst.basics.values import check_number
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from fst.strategies.fst import fst_w
from fst.strategies.registry import register_strategy

HALF = 0.5


@register_strategy("sampled")
def sampled(
    keep: float = HALF,
    center: bool = True,
    grad_input: float | None = None,
) -> Strategy:
    """Y = W·X, dX = Wᵀ·dY, dW from half of the output positions, exact in the mean.

    The model stays dense and trains with fewer multiply-adds. ``keep`` is the share of the
    positions that dW takes. ``grad_input`` is the share of the positions that dX takes; None leaves
    dX exact. Where ``grad_input`` equals ``keep``, one list of positions serves both.
    """
    if grad_input is not None:
        check_number("grad_input", grad_input, "(0, 1]")
    return Strategy(
        "sampled",
        grad_input=None if grad_input is None else Sampled(keep=grad_input),
        grad_weight=Sampled(keep=keep, center=center),
    )


@register_strategy("fst_sampled")
def fst_sampled(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
    keep: float = HALF,
    center: bool = True,
) -> Strategy:
    """Y = S(W)·X, dX = S(Wᵀ)·dY, dW as in `sampled`, plus λ(W − S(W)).

    The model ends with 2:4 weights, as with `fst_w`. ``keep`` and ``center`` are those of
    `sampled`. dX is exact for S(Wᵀ).
    """
    rule = Sampled(keep=keep, center=center)
    base = fst_w(n, m, group_order, decay, decay_mode)
    return replace(base, name="fst_sampled", grad_weight=rule)
