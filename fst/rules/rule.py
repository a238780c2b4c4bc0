"""What a rule is: how one operand of one GEMM is pruned, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.basics.errors import UsageError
from fst.basics.values import one_of

Signs = tuple[tuple[int, ...], ...]


class Pattern(NamedTuple):
    """N:M groups along one axis, as pruning kernels and sparse tensor cores read them.

    Attributes:
        n, m, rule, rescale: as in `NM`.
    """

    n: int
    m: int
    rule: str
    rescale: str


class WeightGroups(NamedTuple):
    """N:M groups of a weight, along the axis ``group_order``: "channel" or "im2col"."""

    n: int
    m: int
    group_order: str


def draw_of(
    phase: int | str, count: int, generator: torch.Generator | None, seed: int | None
) -> int:
    """``phase``, or if it is "random" one of ``count``: by ``seed`` where given, which asks no
    device.
    """
    if phase != "random":
        return int(phase)
    if count == 1:
        return 0
    if torch.compiler.is_compiling():
        raise UsageError(
            "phase='random' chooses between programs at each step, which torch.compile "
            f"cannot trace; use one of phase={', '.join(map(str, range(count)))}."
        )
    if seed is not None:
        return seed % count
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(count, (), generator=generator, device=device))


class Lattice(NamedTuple):
    """Output positions (row + i * row_step, column + j * column_step) of a part of the batch.

    Attributes:
        part, parts: which samples have them: the ``part``-th of ``parts`` equal shares in order.
        weight: how much they count in grad_weight, times the rule's scale.
    """

    row: int
    row_step: int
    column: int
    column_step: int
    part: int = 0
    parts: int = 1
    weight: float = 1.0

    def samples(self, maps: Tensor) -> Tensor:
        """The view of (N, ...) at its part of the batch."""
        if self.parts == 1:
            return maps
        batch = maps.shape[0]
        return maps[batch * self.part // self.parts : batch * (self.part + 1) // self.parts]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of it in a height x width output map."""
        return (
            len(range(self.row, height, self.row_step)),
            len(range(self.column, width, self.column_step)),
        )

    def of(self, maps: Tensor) -> Tensor:
        """The view of (N, C, height, width) at its samples and positions."""
        rows = slice(self.row, None, self.row_step)
        return self.samples(maps)[:, :, rows, self.column :: self.column_step]


@dataclass(frozen=True)
class Rule:
    """How one operand of one GEMM is pruned: override what the operand needs.

    A rule of the weight gives `weight_mask`; one of grad_output `prune_grad_output`; one of the
    input either `kept_positions`, known before any value, or `prune_columns`.

    Attributes:
        operand: "input", "weight" or "grad_output".
    """

    operand: str

    def __post_init__(self) -> None:
        one_of("operand", self.operand, ("input", "weight", "grad_output"))

    # ------------------------------------------------------------------ what it does to tensors

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Mask of ``weight`` (Cout, Cin/groups, kh, kw) for the "output" or "grad_input" GEMM."""
        raise TypeError(f"{self} has no mask of the weight.")

    def prune_grad_output(
        self,
        grad_output: Tensor,
        gemm: str,
        groups: int,
        generator: torch.Generator | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Tensor:
        """grad_output (N, Cout, P, Q) pruned for the "grad_input" or "grad_weight" GEMM.

        Args:
            memory: what the rule left there in the last backward pass of this call, if it
                `has_memory`; None where nothing can be remembered.
        """
        raise TypeError(f"{self} does not prune grad_output.")

    def prune_columns(self, columns: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """im2col(X) (N, Cin·kh·kw, P·Q) pruned for grad_weight.

        Unless the rule `is_random`, N may be a part of the batch.
        """
        raise TypeError(f"{self} does not prune the columns of the input.")

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...] | None:
        """The output positions that grad_weight keeps, whatever the values; None if they decide."""
        return None

    def leaves_dense(self, height: int, width: int) -> bool:
        """Whether grad_weight of a layer with such an output map is left as it is."""
        return False

    def fold(self, grad_output: Tensor, kept: tuple[Lattice, ...], phase: int) -> list[Tensor]:
        """grad_output (N, Cout, P, Q) at each lattice of `kept_positions`."""
        parts = [(lattice.of(grad_output), lattice.weight) for lattice in kept]
        return [part if weight == 1 else part * weight for part, weight in parts]

    def input_signs(self, phase: int) -> tuple[Signs, ...]:
        """For each lattice of `kept_positions`, with which signs the input is summed over a block
        of windows, (block height, block width); nothing where the input is read as it is.
        """
        return ()

    def with_prefix_tokens(self, count: int) -> Rule:
        """The rule for a layer whose rows of positions begin with so many class tokens and
        registers of a transformer.
        """
        return self

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        """Which `kept_positions` a call has: by ``seed`` where given, which asks no device."""
        return 0

    @property
    def draws(self) -> int:
        """How many phases `draw_phase` chooses from where the rule `is_random`."""
        return 1

    # ------------------------------------------------------------------ what others must know

    @property
    def is_random(self) -> bool:
        """Whether the rule draws random numbers."""
        return False

    @property
    def has_memory(self) -> bool:
        """Whether the rule reuses gradients of earlier steps."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether grad_output is pruned in the same way for both backward GEMMs."""
        return False

    @property
    def as_output(self) -> bool:
        """Whether grad_input takes the weight as the output GEMM has pruned it."""
        return False

    @property
    def keeps_mask_for(self) -> int:
        """Optimizer steps for which a mask of the weight is kept; 1: each call has its own."""
        return 1

    @property
    def summed_block(self) -> tuple[int, int] | None:
        """Size of the blocks that `fold` sums, for kernels that do the same with one draw at scale
        1, (1, 1) where it sums nothing; None: `fold` does something else.
        """
        return None

    def pattern(self, gemm: str) -> Pattern | None:
        """The rule as N:M along channels in ``gemm``; None if it is something else."""
        return None

    def pattern_of_positions(self, gemm: str) -> Pattern | None:
        """The rule as N:M of magnitudes along the flattened positions; None if it is another."""
        return None

    @property
    def weight_groups(self) -> WeightGroups | None:
        """The N:M groups of a weight that the rule prunes in output; None where it has none."""
        return None

    @property
    def scale(self) -> float:
        """By what the sum over `kept_positions` is multiplied."""
        return 1.0

    @property
    def centers(self) -> bool:
        """Whether the kept positions see the input less its mean, whose share is computed exactly
        (`fst.ops.centering`).
        """
        return False

    # ------------------------------------------------------------------ what it costs, in words

    @property
    def density(self) -> float:
        """Share of the GEMM's multiply-adds that remain."""
        return 1.0

    def kept(
        self, gemm: str, weight: Sequence[int], groups: int, height: int, width: int
    ) -> tuple[float, float] | None:
        """How many of how many equal parts of the GEMM remain; None where the mask tells.

        Args:
            weight: shape (Cout, Cin/groups, kh, kw).
            height, width: of the output map.
        """
        return None if self.operand == "weight" else (self.density, 1)

    @property
    def acceleration(self) -> str:
        """How fewer multiply-adds are really done, on any device; "" where they are not."""
        return ""

    @property
    def simulation(self) -> str:
        """Why pruning saves no time where it is computed by dense arithmetic."""
        return "dense arithmetic on pruned values"


def phases_of(rule: Rule | None) -> list[int]:
    """The phases that a rule draws from, or the one that it has; [0] for None (dense)."""
    if rule is None:
        return [0]
    return list(range(rule.draws)) if rule.is_random else [rule.draw_phase(None)]


def kept_on_average(rule: Rule, height: int, width: int) -> tuple[float, float]:
    """How many of all output positions `kept_positions` has, in the mean over the phases."""
    phases = phases_of(rule)
    counts = [
        math.prod(lattice.size(height, width)) / lattice.parts
        for phase in phases
        for lattice in rule.kept_positions(height, width, phase) or ()
    ]
    return sum(counts) / len(phases), height * width
