"""What is pruned: one rule for at most one operand of each of a convolution's three GEMMs.

    output      Y  = W  · X      reduction over the input channels (and the kernel)
    grad_input  dX = Wᵀ · dY     reduction over the output channels
    grad_weight dW = dY · Xᵀ     reduction over the output positions

A rule is a frozen dataclass that checks itself; a `Strategy` names a rule (or None, dense) for each
GEMM. How a rule is computed is the business of `fst.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fst._text import suggest
from fst.masks import RESCALES, check_pattern
from fst.schedule import Schedule

GEMMS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("weight",),
    "grad_input": ("weight", "grad_output"),
    "grad_weight": ("grad_output", "input"),
}
GROUP_ORDERS = ("channel", "im2col")
DECAY_MODES = ("gradient", "decoupled")


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
class Alternating(Rule):
    """Keep every other output position of the input in grad_weight (FST, Eq. 7 and 10).

    Attributes:
        pairing: "row" pairs neighbours within a row of the output map, "flat" along the flattened
            map across row ends (the paper literally).
        phase: which of a pair is kept: 0 the first, 1 the second, "random" one of both per step.
        block: (height, width) of a block of positions of which one is kept: (1, 2), or (2, 2)
            for a quarter of the work (needs pairing="row", phase=0).
        restore: information restoration: grad_output of the dropped positions is added to the
            kept one of the same pair or block.
    """

    operand: str = "input"
    pairing: str = "row"
    phase: int | str = 0
    block: tuple[int, int] = (1, 2)
    restore: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operand != "input":
            raise ValueError(f"operand={self.operand!r}: 'alternating' prunes operand='input'.")
        one_of("pairing", self.pairing, ("row", "flat"))
        one_of("phase", self.phase, (0, 1, "random"))
        if isinstance(self.block, list):  # what YAML and JSON make of a tuple
            object.__setattr__(self, "block", tuple(self.block))
        one_of("block", self.block, ((1, 2), (2, 2)))
        one_of("restore", self.restore, (True, False))
        if self.block == (2, 2) and (self.pairing, self.phase) != ("row", 0):
            raise ValueError(
                f"block=(2, 2) needs pairing='row' and phase=0, "
                f"not pairing={self.pairing!r}, phase={self.phase!r}."
            )

    @property
    def is_random(self) -> bool:
        return self.phase == "random"

    @property
    def density(self) -> float:
        return 1 / (self.block[0] * self.block[1])

    def __str__(self) -> str:
        blocks = f"{self.pairing} pairs" if self.block == (1, 2) else "2x2 blocks"
        restored = "restored" if self.restore else "not restored"
        return f"{self.operand} alternating, {blocks}, phase {self.phase}, {restored}"


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


@dataclass(frozen=True)
class Strategy:
    """Which operand of each GEMM is pruned, and how: immutable, hashable, checked on creation.

    Attributes:
        name: how reports and checkpoints call it.
        output, grad_input, grad_weight: a `Rule`, or None for dense.
        decay: λ of SR-STE (Zhou et al. 2021): the dense weight is pulled towards S(W).
        decay_mode: "gradient" adds λ(W − S(W)) to grad_weight (the official code); "decoupled"
            does W ← W − λ(W − S(W)) at each optimizer step (FST, Eq. 6), see `fst.attach`.
        min_in_channels: `fst.convert` leaves convolutions with fewer input channels dense unless
            they are included by name.
        count_zeros: whether layers count the zeros of input and grad_output in training; it
            changes no value.
        schedule: what happens to masks and weights around optimizer steps, see `fst.attach`.
    """

    name: str
    output: Rule | None = None
    grad_input: Rule | None = None
    grad_weight: Rule | None = None
    decay: float = 0.0
    decay_mode: str = "gradient"
    min_in_channels: int = 1
    count_zeros: bool = False
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={self.name!r} must be a non-empty string.")
        for gemm in GEMMS:
            rule = self.rule(gemm)
            if rule is None:
                continue
            if not isinstance(rule, Rule):
                raise TypeError(f"{gemm}={rule!r} must be a fst.Rule or None (dense).")
            if rule.operand not in OPERANDS[gemm]:
                raise ValueError(
                    f"{gemm}: operand={rule.operand!r} cannot be pruned in this GEMM; "
                    f"allowed: {', '.join(OPERANDS[gemm])}."
                )
        self._check_masks_shared_by_gemms()
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float):
            raise ValueError(f"decay={self.decay!r} must be a number >= 0.")
        if not 0 <= self.decay < float("inf"):
            raise ValueError(f"decay={self.decay!r} must be a finite number >= 0.")
        if self.decay and self.output is None:
            raise ValueError(f"decay={self.decay} needs a rule for the weight in output.")
        one_of("decay_mode", self.decay_mode, DECAY_MODES)
        least = self.min_in_channels
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"min_in_channels={least!r} must be an integer >= 1.")
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule={self.schedule!r} must be a fst.Schedule or None.")
        one_of("count_zeros", self.count_zeros, (True, False))

    def _check_masks_shared_by_gemms(self) -> None:
        transposable = any(isinstance(r, Transposable) for r in (self.output, self.grad_input))
        if transposable and self.output != self.grad_input:
            raise ValueError(
                "a transposable mask serves output and grad_input: both need the same rule, "
                f"not output={self.output}, grad_input={self.grad_input}."
            )
        rules = (self.grad_input, self.grad_weight)
        if all(r is not None and r.has_memory for r in rules) and rules[0] != rules[1]:
            raise ValueError(
                "grad_input and grad_weight share what the previous step left: both need the same "
                f"rule, not grad_input={self.grad_input}, grad_weight={self.grad_weight}."
            )
        if isinstance(self.output, SameAsOutput):
            raise ValueError("output: SameAsOutput is a rule of grad_input.")
        if isinstance(self.grad_input, SameAsOutput) and self.output is None:
            raise ValueError("grad_input: SameAsOutput needs a rule in output.")

    def rule(self, gemm: str) -> Rule | None:
        """The rule of "output", "grad_input" or "grad_weight"; None where the GEMM is dense."""
        return getattr(self, gemm)

    @property
    def has_memory(self) -> bool:
        """Whether a layer's backward pass reuses gradients of earlier steps."""
        return any(r is not None and r.has_memory for r in (self.grad_input, self.grad_weight))

    @property
    def removes_channels(self) -> bool:
        """Whether the model gets smaller in training."""
        return self.schedule is not None and self.schedule.removes_channels

    @property
    def gradient_decay(self) -> float:
        """λ as far as it is applied through the gradient."""
        return self.decay if self.decay_mode == "gradient" else 0.0

    def __str__(self) -> str:
        rules = "; ".join(f"{gemm}: {self.rule(gemm) or 'dense'}" for gemm in GEMMS)
        decay = f"; decay {self.decay:g} ({self.decay_mode})" if self.decay else ""
        schedule = f"; {self.schedule}" if self.schedule else ""
        counted = "; zeros are counted" if self.count_zeros else ""
        return f"{self.name} [{rules}{decay}{counted}{schedule}]"
