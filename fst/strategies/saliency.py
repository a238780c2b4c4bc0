"""The four strategies of FST's saliency analysis (Xu et al., AAAI 2022, Eq. 4 and Table 1).

All prune the weight in output, with SR-STE; the name says what grad_input and grad_weight prune:
W for S(Wᵀ), G for S(dY), X for S(Xᵀ). Table 1 sorts every operand; ``rule="alternating"`` gives wx
and gx the fixed mask of Eq. 7 instead, with or without information restoration.
"""

from dataclasses import replace
from typing import Any

from fst.basics.values import one_of
from fst.rules.alternating import Alternating
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.fst import fst_w
from fst.strategies.registry import register_strategy

X_RULES = ("magnitude", "random", "alternating")


@register_strategy("wg")
def wg(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = S(Wᵀ)·dY, dW = S(dY)·Xᵀ."""
    base = fst_w(n, m, group_order, decay, decay_mode)
    return replace(base, name="wg", grad_weight=NM("grad_output", n, m))


@register_strategy("gg")
def gg(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = Wᵀ·S(dY), dW = S(dY)·Xᵀ."""
    base = wg(n, m, group_order, decay, decay_mode)
    return replace(base, name="gg", grad_input=NM("grad_output", n, m))


@register_strategy("wx")
def wx(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude",
    group_order: str = "channel",
    pairing: str | None = None,
    phase: int | str | None = None,
    block: tuple[int, int] | None = None,
    restore: bool | None = None,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = S(Wᵀ)·dY, dW = dY·S(Xᵀ).

    Args:
        rule: of X in grad_weight: "magnitude", "random", or "alternating", FST's fixed mask, which
            alone has ``pairing``, ``phase``, ``block`` and ``restore`` (None: as in ``fst``).
    """
    one_of("rule", rule, X_RULES)
    options: dict[str, Any] = dict(pairing=pairing, phase=phase, block=block, restore=restore)
    given = {name: value for name, value in options.items() if value is not None}
    for name in given if rule != "alternating" else ():
        raise ValueError(f"{name}={given[name]!r} needs rule='alternating', not {rule!r}.")
    grad_weight = Alternating(**given) if rule == "alternating" else NM("input", n, m, rule=rule)
    base = fst_w(n, m, group_order, decay, decay_mode)
    return replace(base, name="wx", grad_weight=grad_weight)


@register_strategy("gx")
def gx(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude",
    group_order: str = "channel",
    pairing: str | None = None,
    phase: int | str | None = None,
    block: tuple[int, int] | None = None,
    restore: bool | None = None,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = Wᵀ·S(dY), dW = dY·S(Xᵀ).

    Args:
        rule: of X in grad_weight: "magnitude", "random", or "alternating", FST's fixed mask, which
            alone has ``pairing``, ``phase``, ``block`` and ``restore`` (None: as in ``fst``).
    """
    base = wx(n, m, rule, group_order, pairing, phase, block, restore, decay, decay_mode)
    return replace(base, name="gx", grad_input=NM("grad_output", n, m))
