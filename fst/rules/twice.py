"""grad_input prunes S(W) once more: the same zeros as in output, and N:M along its own axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fst.rules.nm import NM
from fst.rules.rule import Pattern


@dataclass(frozen=True)
class TwicePruned(NM):
    """N:M along output channels of what the output GEMM has left (double pruning).

    Attributes:
        order: (Cout/groups,) a permutation of the output channels of a convolution group, in which
            the groups of m are formed; None: as they are.
    """

    operand: str = "weight"
    order: Tensor | None = field(default=None, compare=False)
    operands, rules = ("weight",), ("magnitude",)
    after_output = True

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        if self.order is None:
            return super().weight_mask(weight, gemm, groups, generator)
        grouped = weight.unflatten(0, (groups, -1))
        mask = self._mask(grouped.index_select(1, self.order), 1, generator)
        return mask.index_select(1, self.order.argsort()).flatten(0, 1)

    def pattern(self, gemm: str) -> Pattern | None:
        return None

    def __str__(self) -> str:
        order = "" if self.order is None else ", in an order of its own"
        return f"{super().__str__()} of what output keeps{order}"
