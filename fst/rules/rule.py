"""What a rule is: how one operand of one GEMM is pruned."""

from __future__ import annotations

from dataclasses import dataclass

from fst.basics.text import suggest


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is among ``allowed``."""
    # bool is excluded explicitly because True == 1
    if isinstance(value, bool) != any(isinstance(a, bool) for a in allowed) or value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown.{suggest(value, map(str, allowed))}")


def check_interval(interval: object) -> None:
    """Raise ValueError unless ``interval`` is a positive integer."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval={interval!r} must be an integer >= 1.")


@dataclass(frozen=True)
class Rule:
    """How one operand of one GEMM is pruned.

    Attributes:
        operand: "input", "weight" or "grad_output".
    """

    operand: str

    def __post_init__(self) -> None:
        one_of("operand", self.operand, ("input", "weight", "grad_output"))

    @property
    def is_random(self) -> bool:
        """Whether the rule draws random numbers."""
        return False

    @property
    def has_memory(self) -> bool:
        """Whether the rule reuses gradients of earlier steps."""
        return False

    @property
    def density(self) -> float:
        """Share of the GEMM's multiply-adds that remain."""
        return 1.0

    @property
    def simulation(self) -> str:
        """Why pruning saves no time where it is computed by dense arithmetic."""
        return "dense arithmetic on pruned values"
