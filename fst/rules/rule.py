"""The interface of a rule: it prunes one operand of one GEMM, and describes this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fst.basics.values import one_of


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


class Lattice(NamedTuple):
    """Output positions (row + i * row_step, column + j * column_step)."""

    row: int
    row_step: int
    column: int
    column_step: int

    def of(self, maps: Tensor) -> Tensor:
        """The view of (N, C, height, width) at its positions."""
        return maps[:, :, self.row :: self.row_step, self.column :: self.column_step]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of it in a height x width output map."""
        rows = range(self.row, height, self.row_step)
        return len(rows), len(range(self.column, width, self.column_step))


@dataclass(frozen=True)
class Rule:
    """The pruning of one operand of one GEMM. A subclass overrides the method of its operand.

    - weight: `weight_mask`.
    - grad_output: `prune_grad_output`; or the rule is a `fst.rules.sampled.Sampled`.
    - input: `kept_positions`, which are known before any value, or `prune_columns`.

    Attributes:
        operand: "input", "weight" or "grad_output".
        operands: which of them the rule can prune.
        samples: whether the rule draws output positions, as `fst.rules.sampled.Sampled`.
        is_whole: whether grad_output is pruned in the same way for both backward GEMMs.
        as_output: whether grad_input takes the weight as the output GEMM has pruned it.
        after_output: whether grad_input prunes what the output GEMM has left of the weight.
        changes_values: whether output multiplies with `weight_values`, not with what a mask keeps.
    """

    operand: str
    operands: ClassVar[tuple[str, ...]] = ("input", "weight", "grad_output")
    samples: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False
    as_output: ClassVar[bool] = False
    after_output: ClassVar[bool] = False
    changes_values: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("operand", self.operand, self.operands)

    # ------------------------------------------------------------------ what it does to tensors

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Mask of ``weight`` (Cout, Cin/groups, kh, kw) for the "output" or "grad_input" GEMM."""
        raise TypeError(f"{self} has no mask of the weight.")

    def weight_values(self, weight: Tensor, mask: Tensor, groups: int) -> Tensor:
        """S(W) of the output GEMM where the rule `changes_values`; ``mask`` is its `weight_mask`.

        A strategy's decay pulls at the weights that the mask drops, whatever the values are.
        """
        raise TypeError(f"{self} changes no value of the weight.")

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

    def summed(self, grad_output: Tensor, kept: tuple[Lattice, ...], phase: int) -> list[Tensor]:
        """grad_output (N, Cout, P, Q) at each lattice of `kept_positions`."""
        return [lattice.of(grad_output) for lattice in kept]

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        """Which `kept_positions` a call has: by ``seed`` where given, which waits for no device."""
        return 0

    def draw_start(
        self, generator: torch.Generator | None, seed: int | None, device: torch.device
    ) -> Tensor | None:
        """Return the start of a draw of positions, (), float64, in [0, 1); None if none is drawn.

        By ``seed`` where given, which waits for no device; else by ``generator``; without both, by
        the default generator of ``device``.
        """
        return None

    # ------------------------------------------------------------------ what others must know

    @property
    def is_random(self) -> bool:
        """True if the rule draws random numbers."""
        return False

    @property
    def has_memory(self) -> bool:
        """True if the rule reuses gradients of earlier steps."""
        return False

    @property
    def keeps_mask_for(self) -> int:
        """Optimizer steps for which a mask of the weight is kept; 1: each call has its own."""
        return 1

    @property
    def sums_positions(self) -> bool:
        """False if `summed` takes grad_output at the kept positions as it is."""
        return True

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

    # ------------------------------------------------------------------ what it costs

    @property
    def density(self) -> float:
        """Share of the GEMM's multiply-adds that remain."""
        return 1.0

    @property
    def acceleration(self) -> str:
        """Why this rule saves multiply-adds on any device; "" if it does not."""
        return ""

    @property
    def simulation(self) -> str:
        """Why pruning saves no time where it is computed by dense arithmetic."""
        return "dense arithmetic on pruned values"
