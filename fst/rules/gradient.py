"""Rules that prune grad_output as a whole, so that one selection serves both backward GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from fst.rules.rule import Rule


@dataclass(frozen=True)
class WholeGradient(Rule):
    """What `TopK` and `Reuse` share: grad_output, and the share of it that is kept.

    Attributes:
        density: 0 < density <= 1.
    """

    operand: str = "grad_output"
    density: float = 0.5

    def __post_init__(self) -> None:
        if self.operand != "grad_output":
            raise ValueError(
                f"operand={self.operand!r}: {type(self).__name__} prunes operand='grad_output'."
            )
        _check_number("density", self.density)
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be above 0 and at most 1.")


@dataclass(frozen=True)
class TopK(WholeGradient):
    """Keep the largest |grad_output| of each sample (meProp, Sun et al. 2017, Eq. 6 to 8).

    Of a sample's L = Cout·P·Q elements it keeps exactly max(1, round(density·L)); ties keep the
    lower index in the order (cout, p, q).
    """

    def __str__(self) -> str:
        return f"{self.operand} top {self.density:g} per sample"


@dataclass(frozen=True)
class Reuse(WholeGradient):
    """Keep what differs from the previous step's grad_output, reuse that elsewhere (ReSprop).

    Attributes:
        density: the share that is to be kept; the threshold on |difference| doubles after a step
            that kept more, and halves after one that kept less.
        threshold: where it starts, in units of grad_output.
        warmup: steps in which the share falls linearly from 1 to ``density``.
    """

    threshold: float = 1e-7
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("threshold", self.threshold)
        if not 0 < self.threshold < float("inf"):
            raise ValueError(f"threshold={self.threshold} must be a finite number > 0.")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup={self.warmup!r} must be an integer >= 0.")

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def simulation(self) -> str:
        kept = "Cout·P·Q values, a sample of the previous grad_output, for each layer and call"
        return f"{super().simulation}; keeps {kept}"

    def density_at(self, step: int) -> float:
        """The share to keep after ``step`` steps of the layer."""
        return 1 - (1 - self.density) * min(1.0, step / self.warmup if self.warmup else 1.0)

    def __str__(self) -> str:
        details = f", from threshold {self.threshold:g}"
        if self.warmup:
            details += f", {self.warmup} steps of warm-up"
        return f"{self.operand} {self.density:g} by difference from the previous step{details}"


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} must be a number.")
