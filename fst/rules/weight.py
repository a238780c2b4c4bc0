"""Rules of the weight without groups of M: single elements, and patterns of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fst.basics.values import is_number, one_of
from fst.rules import masks
from fst.rules.masks import KERNEL_PATTERNS
from fst.rules.rule import Rule


def check_share(name: str, value: object, *, up_to_all: bool = False) -> None:
    """Raise ValueError unless 0 <= value < 1, or 0 <= value <= 1 with ``up_to_all``."""
    if is_number(value) and (0 <= value < 1 or (value == 1 and up_to_all)):
        return
    limit = "<=" if up_to_all else "<"
    raise ValueError(f"{name}={value!r} must be a number with 0 <= {name} {limit} 1.")


@dataclass(frozen=True)
class Unstructured(Rule):
    """Keep the largest elements of a layer's weight, wherever they are.

    Attributes:
        sparsity: share of the elements that is pruned, rounded to whole elements; at least one
            element stays.
    """

    operand: str = "weight"
    sparsity: float = 0.5
    simulation = "unstructured: no hardware path, dense arithmetic on pruned values"

    def __post_init__(self) -> None:
        one_of("operand", self.operand, ("weight",))
        check_share("sparsity", self.sparsity)

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        return masks.unstructured_mask(weight, self.sparsity)

    @property
    def density(self) -> float:
        return 1 - self.sparsity

    def __str__(self) -> str:
        return f"{self.operand} unstructured, sparsity {self.sparsity:g}"


@dataclass(frozen=True)
class KernelPatterns(Rule):
    """Four of nine entries of each 3x3 kernel, and whole kernels (Zhang et al. 2021).

    Attributes:
        patterns: size of the set that a kernel's entries are chosen from: 4, 8 or 12.
        connectivity: share of the layer's kernels that is pruned whole, of any kernel size.
    """

    operand: str = "weight"
    patterns: int = 4
    connectivity: float = 0.375
    simulation = "kernel patterns need a compiler's kernels: dense arithmetic on pruned values"

    def __post_init__(self) -> None:
        one_of("operand", self.operand, ("weight",))
        one_of("patterns", self.patterns, (4, 8, len(KERNEL_PATTERNS)))
        check_share("connectivity", self.connectivity)

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        scores = masks.widened(weight).square()
        kernels = masks.connectivity_mask(scores, self.connectivity)
        return masks.pattern_mask(scores, self.patterns) & kernels

    @property
    def density(self) -> float:
        return 4 / 9 * (1 - self.connectivity)

    def __str__(self) -> str:
        kernels = f"{self.connectivity:g} of the kernels pruned"
        return f"{self.operand} in {self.patterns} kernel patterns, {kernels}"
