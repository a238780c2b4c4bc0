"""The rule of the weight without groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fst.basics.values import check_number
from fst.rules import masks
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
