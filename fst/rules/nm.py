"""Rules with groups of M along the reduction axis, and masks shared by two GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from fst.rules.masks import RESCALES, check_pattern
from fst.rules.rule import Rule, check_interval, one_of

GROUP_ORDERS = ("channel", "im2col")


@dataclass(frozen=True)
class NM(Rule):
    """Keep n of every m consecutive elements along the GEMM's reduction axis.

    Attributes:
        n, m: 1 <= n <= m <= 32; n == m is dense.
        rule: "magnitude", "random" or "magnitude_rescaled" (SDGP's "Res. Mag.").
        rescale: over what "magnitude_rescaled" preserves the L1 norm: "sample_channel" (the
            published code), "channel" (the paper's text) or "group".
        group_order: for weight in output: groups run along input "channel"s for each kernel
            position, or along the flattened "im2col" axis (input channel, kh, kw). For grad_output
            in grad_input: along output "channel"s, or along output "position"s, which no sparse
            hardware can use: for the study of the papers' contradiction.
    """

    n: int = 2
    m: int = 4
    rule: str = "magnitude"
    rescale: str = "sample_channel"
    group_order: str = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.n, self.m)
        one_of("rule", self.rule, ("magnitude", "random", "magnitude_rescaled"))
        one_of("rescale", self.rescale, RESCALES)
        orders = ("channel", "position") if self.operand == "grad_output" else GROUP_ORDERS
        one_of("group_order", self.group_order, orders)
        if self.rule == "magnitude_rescaled" and self.operand != "grad_output":
            raise ValueError(
                f"rule='magnitude_rescaled' is defined for operand='grad_output', "
                f"not for operand={self.operand!r}."
            )

    @property
    def is_random(self) -> bool:
        return self.rule == "random"

    @property
    def density(self) -> float:
        return self.n / self.m

    def __str__(self) -> str:
        details = [self.rule]
        if self.rule == "magnitude_rescaled":
            details.append(f"per {self.rescale}")
        if self.group_order != "channel":
            details.append(f"{self.group_order} order")
        return f"{self.operand} {self.n}:{self.m} {', '.join(details)}"


@dataclass(frozen=True)
class Transposable(Rule):
    """One mask for W and Wᵀ: n of m in each row and column of m x m tiles (Hubara et al. 2021).

    Attributes:
        n, m: 2:4 is solved exactly, m > 4 by the greedy 2-approximation.
        interval: training steps between two searches of the mask.
        group_order: tiles are (output channel x input channel) for each kernel position with
            "channel", (output channel x flattened (input channel, kh, kw)) with "im2col".
    """

    operand: str = "weight"
    n: int = 2
    m: int = 4
    interval: int = 40
    group_order: str = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operand != "weight":
            raise ValueError(f"operand={self.operand!r}: 'transposable' prunes operand='weight'.")
        check_pattern(self.n, self.m)
        check_interval(self.interval)
        one_of("group_order", self.group_order, GROUP_ORDERS)

    @property
    def density(self) -> float:
        return self.n / self.m

    def __str__(self) -> str:
        order = "" if self.group_order == "channel" else f", {self.group_order} order"
        return f"{self.operand} {self.n}:{self.m} transposable, every {self.interval} steps{order}"


@dataclass(frozen=True)
class SameAsOutput(Rule):
    """grad_input uses the weight exactly as the output GEMM pruned it (not a mask of Wᵀ's own)."""

    operand: str = "weight"

    def __post_init__(self) -> None:
        one_of("operand", self.operand, ("weight",))

    def __str__(self) -> str:
        return f"{self.operand} as in output"
