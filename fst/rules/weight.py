"""Rules of the weight without groups of M: single elements, and patterns of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fst.basics.values import check_number, one_of
from fst.rules import masks
from fst.rules.masks import KERNEL_PATTERNS
from fst.rules.rule import Rule


@dataclass(frozen=True)
class Unstructured(Rule):
    """Keep the largest elements of a layer's weight, wherever they are.

    Attributes:
        sparsity: share of the elements that is pruned, rounded to whole elements; at least one
            element stays.
    """

    operand: str = "weight"
    sparsity: float = 0.5
    operands = ("weight",)
    simulation = "unstructured: no hardware path, dense arithmetic on pruned values"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("sparsity", self.sparsity, "[0, 1)")

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
    operands = ("weight",)
    simulation = "kernel patterns need a compiler's kernels: dense arithmetic on pruned values"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("patterns", self.patterns, (4, 8, len(KERNEL_PATTERNS)))
        check_number("connectivity", self.connectivity, "[0, 1)")

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
