"""What a rule is: how one operand of one GEMM is pruned, in numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Pattern(NamedTuple):
    """N:M groups along channels, as pruning kernels and sparse tensor cores read them.

    Attributes:
        n, m, rule, rescale: as in `NM`.
    """

    n: int
    m: int
    rule: str
    rescale: str


class Lattice(NamedTuple):
    """Output positions (row + i * row_step, column + j * column_step)."""

    row: int
    row_step: int
    column: int
    column_step: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of it in a height x width output map."""
        return (
            len(range(self.row, height, self.row_step)),
            len(range(self.column, width, self.column_step)),
        )

    def of(self, maps: Tensor) -> Tensor:
        """The view of (N, C, height, width) at its positions."""
        return maps[:, :, self.row :: self.row_step, self.column :: self.column_step]


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
        """im2col(X) (N, Cin·kh·kw, P·Q) pruned for grad_weight."""
        raise TypeError(f"{self} does not prune the columns of the input.")

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...] | None:
        """The output positions that grad_weight keeps, whatever the values; None if they decide."""
        return None

    def fold(self, grad_output: Tensor, kept: tuple[Lattice, ...], phase: int) -> list[Tensor]:
        """grad_output (N, Cout, P, Q) at each lattice of `kept_positions`."""
        return [lattice.of(grad_output) for lattice in kept]

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        """Which `kept_positions` a call has: by ``seed`` where given, which asks no device."""
        return 0

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
        """Size of the blocks that `fold` sums, for kernels that do the same; None: no such sums."""
        return (1, 1)

    def pattern(self, gemm: str) -> Pattern | None:
        """The rule as N:M along channels in ``gemm``; None if it is something else."""
        return None

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
