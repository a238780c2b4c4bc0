"""Rules with groups of M along the reduction axis, and masks shared by two GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fst.basics.values import check_integer, one_of
from fst.rules import masks
from fst.rules.masks import RESCALES, check_pattern
from fst.rules.mvue import mvue
from fst.rules.rule import Pattern, Rule, WeightGroups
from fst.rules.transposable_masks import transposable_mask

GROUP_ORDERS = ("channel", "im2col")
UNBIASED = ("mvue", "mvue_approximate")
RULES = ("magnitude", "random", "magnitude_rescaled", *UNBIASED)


@dataclass(frozen=True)
class NM(Rule):
    """Keep n of every m consecutive elements along the GEMM's reduction axis.

    Attributes:
        n, m: 1 <= n <= m <= 32; n == m is dense.
        rule: "magnitude", "random" or "magnitude_rescaled" (SDGP's "Res. Mag."); for grad_output
            "mvue", exact in the mean (Chmiel et al. 2023), or for 2:4 "mvue_approximate", the draw
            of the official code, whose variance is larger.
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
    rules: ClassVar[tuple[str, ...]] = RULES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.n, self.m)
        one_of("rule", self.rule, self.rules)
        one_of("rescale", self.rescale, RESCALES)
        orders = ("channel", "position") if self.operand == "grad_output" else GROUP_ORDERS
        one_of("group_order", self.group_order, orders)
        if self.rule not in ("magnitude", "random") and self.operand != "grad_output":
            raise ValueError(
                f"rule={self.rule!r} is defined for operand='grad_output', "
                f"not for operand={self.operand!r}."
            )

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        if gemm == "grad_input" and groups == 1:
            return self._mask(weight, 0, generator)
        if gemm == "grad_input":
            return self._mask(weight.unflatten(0, (groups, -1)), 1, generator).flatten(0, 1)
        if self.group_order == "im2col":
            return self._mask(weight.flatten(1), 1, generator).view(weight.shape)
        return self._mask(weight, 1, generator)

    def prune_grad_output(
        self,
        grad_output: Tensor,
        gemm: str,
        groups: int,
        generator: torch.Generator | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Tensor:
        """Groups of M run along the output channels of a convolution group in grad_input, else
        along the flattened P·Q.

        Large ones are pruned some samples at a time, where samples know nothing of each other.
        """
        size = len(grad_output)
        rescaled = self.rule == "magnitude_rescaled"
        if not self.is_random and not (rescaled and self.rescale == "channel"):
            size = masks.samples_in_cache(grad_output)
        if size == len(grad_output):
            return self._pruned(grad_output, gemm, groups, generator)
        result = torch.empty_like(grad_output)
        for part, target in zip(grad_output.split(size), result.split(size), strict=True):
            target.copy_(self._pruned(part, gemm, groups, generator))
        return result

    def _pruned(
        self, grad_output: Tensor, gemm: str, groups: int, generator: torch.Generator | None
    ) -> Tensor:
        view, axis = grad_output, 1
        if not self._runs_along_channels(gemm):
            view, axis = grad_output.flatten(2), 2
        elif groups > 1:
            view, axis = grad_output.unflatten(1, (groups, grad_output.shape[1] // groups)), 2
        if self.rule in UNBIASED and self.n == self.m:
            return grad_output
        if self.rule in UNBIASED:
            approximate = self.rule == "mvue_approximate"
            drawn = mvue(view, self.n, self.m, axis, generator, approximate=approximate)
            return drawn.reshape(grad_output.shape)
        pruned = masks.apply_mask(view, self._mask(view, axis, generator))
        rescaled = self.rule == "magnitude_rescaled"
        if rescaled and self.rescale == "group":
            pruned.mul_(masks.l1_scale(view, pruned, "group", self.m, axis))
        if view is not grad_output:
            pruned = pruned.reshape(grad_output.shape)
        if rescaled and self.rescale != "group":
            pruned.mul_(masks.l1_scale(grad_output, pruned, self.rescale, self.m, 1))
        return pruned

    def prune_columns(self, columns: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return masks.apply_mask(columns, self._mask(columns, 2, generator))

    def _mask(self, tensor: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
        kind = "random" if self.rule == "random" else "magnitude"
        return masks.nm_mask(tensor, self.n, self.m, dim, kind, generator)

    @property
    def is_random(self) -> bool:
        return self.rule == "random" or self.rule in UNBIASED

    def _runs_along_channels(self, gemm: str) -> bool:
        return gemm != "grad_weight" and self.group_order == "channel"

    def pattern(self, gemm: str) -> Pattern | None:
        if not self._runs_along_channels(gemm) or self.rule in UNBIASED:
            return None
        return Pattern(self.n, self.m, self.rule, self.rescale)

    def pattern_of_positions(self, gemm: str) -> Pattern | None:
        if self.operand == "weight" or self.rule != "magnitude" or self.pattern(gemm) is not None:
            return None
        return Pattern(self.n, self.m, self.rule, self.rescale)

    @property
    def weight_groups(self) -> WeightGroups | None:
        is_weight = self.operand == "weight"
        return WeightGroups(self.n, self.m, self.group_order) if is_weight else None

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
class TwicePruned(NM):
    """Double pruning: grad_input prunes S(W) once more, along the output channels.

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
        order, grouped = self.order.to(weight.device), weight.unflatten(0, (groups, -1))
        mask = self._mask(grouped.index_select(1, order), 1, generator)
        return mask.index_select(1, order.argsort()).flatten(0, 1)

    def pattern(self, gemm: str) -> Pattern | None:
        return None

    def __str__(self) -> str:
        order = "" if self.order is None else ", in an order of its own"
        return f"{super().__str__()} of what output keeps{order}"


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
    operands = ("weight",)
    as_output = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.n, self.m)
        check_integer("interval", self.interval, 1)
        one_of("group_order", self.group_order, GROUP_ORDERS)

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        grouped = weight.unflatten(0, (groups, -1))
        if self.group_order == "im2col":
            mask = transposable_mask(grouped.flatten(2), self.n, self.m)
            return mask.reshape(weight.shape)
        mask = transposable_mask(grouped.permute(0, 3, 4, 1, 2), self.n, self.m)
        return mask.permute(0, 3, 4, 1, 2).flatten(0, 1)

    @property
    def keeps_mask_for(self) -> int:
        return self.interval

    @property
    def weight_groups(self) -> WeightGroups:
        return WeightGroups(self.n, self.m, self.group_order)

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
    operands = ("weight",)
    as_output = True

    def __str__(self) -> str:
        return f"{self.operand} as in output"
