"""Cheaper weight gradients that lose next to nothing: sampling with centring, and bands.

Not of a paper: FST (Xu et al., AAAI 2022) sums pairs of grad_output and drops every other column of
X (Eq. 10), which filters the weight gradient along one axis. Here positions are sampled instead,
unbiased, or low and high bands of both operands multiplied; docs/weight_gradient.md derives them
and compares.
"""

from dataclasses import replace

from fst.rules.bands import Bands
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from fst.strategies.fst import fst_w
from fst.strategies.registry import register_strategy


@register_strategy("sampled")
def sampled(
    keep: int = 2,
    axis: str = "both",
    center: bool = True,
    min_size: int = 7,
    phase: int | str = "random",
    split: bool = False,
    prefix_tokens: int | None = None,
) -> Strategy:
    """Y = W·X, dX = Wᵀ·dY, dW from one of ``keep`` output positions, exact in the mean.

    Only grad_weight is pruned, by `Sampled`: a dense model that trains with fewer multiply-adds.
    ``min_size=7`` leaves the smallest maps of networks for 32x32 images dense, as in the trainings
    of docs/weight_gradient.md, and samples the last stage of networks for 224x224 images. Class
    tokens, where `fst.convert` finds the model's ``num_prefix_tokens`` (timm), or those of
    ``prefix_tokens``, stay exact (docs/linear.md).
    """
    rule = Sampled("input", keep, axis, center, min_size, phase, split, prefix_tokens)
    return Strategy("sampled", grad_weight=rule)


@register_strategy("fst_sampled")
def fst_sampled(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
    keep: int = 2,
    axis: str = "both",
    center: bool = True,
    min_size: int = 7,
    phase: int | str = "random",
    split: bool = False,
    prefix_tokens: int | None = None,
) -> Strategy:
    """`fst_w` with the weight gradient of `sampled`: all three GEMMs pruned, none biased by FST's
    decimation.

    In a short training a larger ``decay`` may hold the masks against the noise of sampling: 5e-3
    did in docs/weight_gradient.md.
    """
    rule = sampled(keep, axis, center, min_size, phase, split, prefix_tokens).grad_weight
    base = fst_w(n, m, group_order, decay, decay_mode)
    return replace(base, name="fst_sampled", grad_weight=rule)


@register_strategy("bands")
def bands(
    block: tuple[int, int] = (2, 2),
    keep: list[str] | tuple[str, ...] = ("LL",),
    sample: list[str] | tuple[str, ...] = ("LH", "HL"),
    unbiased: bool = False,
    min_size: int = 7,
    phase: int | str = "random",
) -> Strategy:
    """`sampled` with `Bands` of the output positions instead, of which some may be left out."""
    rule = Bands(
        block=block,
        keep=tuple(keep),
        sample=tuple(sample),
        unbiased=unbiased,
        min_size=min_size,
        phase=phase,
    )
    return Strategy("bands", grad_weight=rule)
