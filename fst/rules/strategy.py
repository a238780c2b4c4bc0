"""A strategy: one rule for at most one operand of each of a convolution's three GEMMs.

    output      Y  = W  · X      reduction over the input channels (and the kernel)
    grad_input  dX = Wᵀ · dY     reduction over the output channels
    grad_weight dW = dY · Xᵀ     reduction over the output positions

A rule is a frozen dataclass that checks itself; a `Strategy` names a rule (or None, dense) for each
GEMM. How a rule is computed is the business of `fst.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fst.basics.values import check_integer, check_number, one_of
from fst.rules.nm import SameAsOutput, Transposable
from fst.rules.rule import Rule
from fst.rules.sampled import Sampled
from fst.rules.schedule import Schedule

GEMMS = ("output", "grad_input", "grad_weight")


OPERANDS = {
    "output": ("weight",),
    "grad_input": ("weight", "grad_output"),
    "grad_weight": ("grad_output", "input"),
}


DECAY_MODES = ("gradient", "decoupled")
# n, m of S(W), then of S(Wᵀ); n = 0 where it is not computed.
WeightPatterns = tuple[int, int, int, int]


@dataclass(frozen=True)
class Strategy:
    """Which operand of each GEMM is pruned, and how: immutable, hashable, checked on creation.

    Attributes:
        name: how reports and checkpoints call it.
        output, grad_input, grad_weight: a `Rule`, or None for dense.
        decay: λ of SR-STE (Zhou et al. 2021): the dense weight is pulled towards S(W).
        decay_mode: "gradient" adds λ(W − S(W)) to the weight's gradient (the official code);
            "decoupled" does W ← W − λ(W − S(W)) (FST, Eq. 6). Both act once, when an optimizer of
            ``torch.optim`` steps: in layers ``.grad`` before it, and what `torch.autograd.grad`
            returns, are the loss's alone, and a loop that updates weights by hand has no decay.
            `fst.sparse_conv2d` has no step: it adds the term of "gradient" in its backward pass.
        min_in_channels: `fst.convert` leaves convolutions with fewer input channels dense unless
            they are included by name.
        skips_zeros: False for the library's own products, whatever zeros the operands have.
        schedule: what happens to masks and weights around optimizer steps, see `fst.attach`.
    """

    name: str
    output: Rule | None = None
    grad_input: Rule | None = None
    grad_weight: Rule | None = None
    decay: float = 0.0
    decay_mode: str = "gradient"
    min_in_channels: int = 1
    skips_zeros: bool = True
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
        check_number("decay", self.decay, "[0, inf)")
        if self.decay and self.output is None:
            raise ValueError(f"decay={self.decay} needs a rule for the weight in output.")
        one_of("decay_mode", self.decay_mode, DECAY_MODES)
        check_integer("min_in_channels", self.min_in_channels, 1)
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule={self.schedule!r} must be a fst.Schedule or None.")

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
        rule = self.grad_input
        if rule is not None and (rule.as_output or rule.after_output) and self.output is None:
            raise ValueError(f"grad_input: {type(rule).__name__} needs a rule in output.")

    def rule(self, gemm: str) -> Rule | None:
        """The rule of "output", "grad_input" or "grad_weight"; None where the GEMM is dense."""
        return getattr(self, gemm)

    def with_pattern(self, n: int, m: int) -> Strategy:
        """The strategy with its weights pruned to n:m; dY and X are pruned as before.

        Raises:
            ValueError: it prunes no weight to N:M in output, or n and m are no pattern.
        """
        if self.output is None or self.output.weight_groups is None:
            raise ValueError(f"strategy {self.name!r} prunes no weight to N:M in output.")
        grad_input = self.grad_input
        if grad_input is not None and grad_input.weight_groups is not None:
            grad_input = replace(grad_input, n=n, m=m)  # type: ignore[call-arg]
        return replace(self, output=replace(self.output, n=n, m=m), grad_input=grad_input)  # type: ignore[call-arg]

    @property
    def sampling(self) -> Sampled | None:
        """The rule that draws output positions in the backward pass; None where none does."""
        rules = (self.grad_weight, self.grad_input)
        return next((rule for rule in rules if isinstance(rule, Sampled)), None)

    @cached_property
    def prunes(self) -> bool:
        """True if the strategy prunes any operand, now or in a later phase."""
        return self.schedule is not None or any(self.rule(gemm) is not None for gemm in GEMMS)

    @cached_property
    def only_samples(self) -> bool:
        """True if the strategy draws positions and prunes nothing else."""
        rules = (self.grad_input, self.grad_weight)
        pruned = self.output is not None or self.schedule is not None
        return not pruned and all(rule is None or isinstance(rule, Sampled) for rule in rules)

    @cached_property
    def prunes_only_weights(self) -> bool:
        """True if the strategy prunes neither grad_output nor the input: gradients are those of a
        convolution with S(W), and have derivatives.
        """
        rules = (self.grad_input, self.grad_weight)
        return all(rule is None or rule.operand == "weight" for rule in rules)

    @cached_property
    def multiplies_one_weight(self) -> bool:
        """True if output and grad_input multiply with one tensor, S(W) or W, and nothing else is
        pruned: the layer is a convolution with that weight.
        """
        rule = self.grad_input
        same = self.output is None if rule is None else rule.as_output
        return self.prunes_only_weights and same

    @property
    def has_memory(self) -> bool:
        """True if a layer's backward pass reuses gradients of earlier steps."""
        return any(r is not None and r.has_memory for r in (self.grad_input, self.grad_weight))

    @cached_property
    def weight_texts(self) -> tuple[str, str]:
        """The rules of output and grad_input as text."""
        return str(self.output), str(self.grad_input)

    @property
    def weight_patterns(self) -> WeightPatterns | None:
        """The N:M by magnitude of S(W) and of S(Wᵀ); None where another rule prunes the weight."""
        n_and_m: list[int] = []
        for gemm in ("output", "grad_input"):
            rule, found = self.rule(gemm), (0, 1)
            if rule is not None and rule.operand == "weight" and not _is_from_output(rule, gemm):
                pattern = rule.pattern(gemm)
                if pattern is None or pattern.rule != "magnitude":
                    return None
                found = pattern.n, pattern.m
            n_and_m += found
        n, m, n_of_transposed, m_of_transposed = n_and_m
        return (n, m, n_of_transposed, m_of_transposed) if n or n_of_transposed else None

    def keeps_all(self, channels: int, filters: int) -> bool:
        """True if convolution groups of so many input and output channels are too small for any
        rule to leave something out, as those of depthwise layers are for N:M.
        """
        if self.schedule is not None or self.is_random:
            return False
        for gemm, most in (("output", channels), ("grad_input", filters), ("grad_weight", filters)):
            rule = self.rule(gemm)
            if rule is None or _is_from_output(rule, gemm):
                continue
            pattern = rule.pattern(gemm)
            if pattern is None or pattern.n < most:
                return False
        return True

    @property
    def gradient_decay(self) -> float:
        """λ as far as it is applied through the gradient."""
        return self.decay if self.decay_mode == "gradient" else 0.0

    @property
    def keeps_masks(self) -> bool:
        """True if a layer's mask is state, which a schedule or the rule's interval changes."""
        interval = self.output.keeps_mask_for if self.output else 1
        return interval > 1 or self.schedule is not None

    @property
    def replaces_parameters(self) -> bool:
        """True if the model gets smaller in training, with new Parameters."""
        return self.schedule is not None and self.schedule.replaces_parameters

    @cached_property
    def is_random(self) -> bool:
        """True if any rule draws random numbers."""
        rules = (self.rule(gemm) for gemm in GEMMS)
        return any(rule is not None and rule.is_random for rule in rules)

    @cached_property
    def has_draws(self) -> bool:
        """True if calls differ by more than their tensors: by draws, phases or memories."""
        rule = self.grad_weight
        has_phase = rule is not None and rule.operand == "input"
        return has_phase or self.is_random or self.has_memory

    @cached_property
    def draws_masks(self) -> bool:
        """True if masks of the weight are drawn at random."""
        rules = (self.output, self.grad_input)
        return any(r is not None and r.operand == "weight" and r.is_random for r in rules)

    def __str__(self) -> str:
        rules = "; ".join(f"{gemm}: {self.rule(gemm) or 'dense'}" for gemm in GEMMS)
        decay = f"; decay {self.decay:g} ({self.decay_mode})" if self.decay else ""
        schedule = f"; {self.schedule}" if self.schedule else ""
        return f"{self.name} [{rules}{decay}{schedule}]"


def _is_from_output(rule: Rule, gemm: str) -> bool:
    """True where grad_input multiplies with S(W) as output does."""
    return gemm == "grad_input" and rule.as_output
