"""The four strategies of FST's saliency analysis (Xu et al., AAAI 2022, Eq. 4 and Table 1).

All prune the weight in output, with SR-STE; the name says what grad_input and grad_weight prune:
W for S(Wᵀ), G for S(dY), X for S(Xᵀ). Table 1 sorts every operand; ``rule="alternating"`` gives wx
and gx the fixed mask of Eq. 7 instead, with or without information restoration.
"""

from fst._text import suggest
from fst.strategies import register_strategy
from fst.strategy import NM, Alternating, Rule, Strategy

X_RULES = ("magnitude", "random", "alternating")


def _input_rule(
    n: int, m: int, rule: str, pairing: str, phase: int | str, block: tuple[int, int], restore: bool
) -> Rule:
    if rule not in X_RULES:
        raise ValueError(f"rule={rule!r} is unknown.{suggest(rule, X_RULES)}")
    if rule == "alternating":
        return Alternating(pairing=pairing, phase=phase, block=block, restore=restore)
    return NM("input", n, m, rule=rule)


@register_strategy("wg")
def wg(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = S(Wᵀ)·dY, dW = S(dY)·Xᵀ."""
    return Strategy(
        "wg",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=NM("weight", n, m),
        grad_weight=NM("grad_output", n, m),
        decay=decay,
        decay_mode=decay_mode,
    )


@register_strategy("wx")
def wx(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude",
    group_order: str = "channel",
    pairing: str = "row",
    phase: int | str = 0,
    block: tuple[int, int] = (1, 2),
    restore: bool = True,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = S(Wᵀ)·dY, dW = dY·S(Xᵀ)."""
    return Strategy(
        "wx",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=NM("weight", n, m),
        grad_weight=_input_rule(n, m, rule, pairing, phase, block, restore),
        decay=decay,
        decay_mode=decay_mode,
    )


@register_strategy("gg")
def gg(
    n: int = 2,
    m: int = 4,
    group_order: str = "channel",
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = Wᵀ·S(dY), dW = S(dY)·Xᵀ."""
    return Strategy(
        "gg",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=NM("grad_output", n, m),
        grad_weight=NM("grad_output", n, m),
        decay=decay,
        decay_mode=decay_mode,
    )


@register_strategy("gx")
def gx(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude",
    group_order: str = "channel",
    pairing: str = "row",
    phase: int | str = 0,
    block: tuple[int, int] = (1, 2),
    restore: bool = True,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
) -> Strategy:
    """dX = Wᵀ·S(dY), dW = dY·S(Xᵀ)."""
    return Strategy(
        "gx",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=NM("grad_output", n, m),
        grad_weight=_input_rule(n, m, rule, pairing, phase, block, restore),
        decay=decay,
        decay_mode=decay_mode,
    )
