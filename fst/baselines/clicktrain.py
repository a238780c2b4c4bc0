"""ClickTrain: kernel patterns and whole-kernel pruning, chosen and enforced in one training.

Paper: Zhang et al., "ClickTrain: Efficient and Accurate End-to-End Deep Learning Training via
Fine-Grained Architecture-Preserving Pruning", ICS 2021. Official code:
github.com/hipdac-lab/ICS21-ClickTrain, which decides here, with the fractions and the coefficient
of its ResNet-50 configuration:

1. dense training for 35 of 95 epochs;
2. then each 3x3 kernel is given the pattern (4 of 9 entries) of highest Σ(W·dW)² among a fixed set
   of 4, 8 or 12, and the kernels of lowest Σ(W·dW)² are marked; until epoch 78 a group lasso
   λ·Σ‖·‖₂ over kernels pulls to zero what either would prune;
3. then both masks are applied for good, and held in weights and momentum.

Simplified: one share of pruned kernels for all layers (0.375, the mean of the configuration, whose
layers have 0.25 to 0.55); the pattern set is the code's, not found during training as the paper
describes; nothing is made faster by a compiler. Convolutions of images (fewer than four input
channels) stay dense; the code's also exclude shortcuts: ``exclude="*downsample*"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fst.basics.values import check_number, one_of
from fst.rules import masks
from fst.rules.nm import SameAsOutput
from fst.rules.rule import Rule
from fst.rules.schedule import Layers, PrunedLayer, Run, Schedule, hold_at_zero, mask_gradients
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

# The sets are the first 4, 8 or 12 of these 3x3 patterns, row by row.
KERNEL_PATTERNS = (
    *("000011011", "000110110", "011011000", "110110000"),
    *("000001111", "000111010", "010011010", "010110010"),
    *("111010000", "000100111", "111100000", "000101011"),
)


def kernel_scores(scores: Tensor) -> Tensor:
    """Σ of ``scores`` (Cout, Cin/groups, kh, kw) over each kernel, at least in float32."""
    return masks.widened(scores).sum((2, 3), keepdim=True)


def pattern_mask(scores: Tensor, patterns: int) -> Tensor:
    """Mask that gives each 3x3 kernel the one of the first patterns whose ``scores`` sum highest.

    ``scores`` (Cout, Cin/groups, kh, kw) are not negative; kernels of other sizes are kept whole.
    """
    if scores.shape[2:] != (3, 3):
        return torch.ones_like(scores, dtype=torch.bool)
    table = [[entry == "1" for entry in pattern] for pattern in KERNEL_PATTERNS[:patterns]]
    kept = masks.constant(table, scores.device).view(-1, 3, 3)
    sums = torch.stack([kernel_scores(scores * pattern) for pattern in kept])
    return kept[sums.squeeze((3, 4)).argmax(0)]


def connectivity_mask(scores: Tensor, connectivity: float) -> Tensor:
    """Mask (Cout, Cin/groups, 1, 1) of the kernels whose ``scores`` sum highest."""
    totals = kernel_scores(scores)
    return masks.largest_mask(totals, masks.kept_count(totals.numel(), connectivity))


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
        kernels = connectivity_mask(scores, self.connectivity)
        return pattern_mask(scores, self.patterns) & kernels

    @property
    def density(self) -> float:
        return 4 / 9 * (1 - self.connectivity)

    def __str__(self) -> str:
        kernels = f"{self.connectivity:g} of the kernels pruned"
        return f"{self.operand} in {self.patterns} kernel patterns, {kernels}"


@dataclass(frozen=True)
class PatternSelection(Schedule):
    """Masks chosen by weight times gradient, approached by a group lasso, then held.

    Attributes:
        choose, enforce: shares of the training after which masks are chosen and enforced.
        lasso: coefficient λ of the group lasso in between.
    """

    choose: float = 35 / 95
    enforce: float = 78 / 95
    lasso: float = 2.5e-4
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        check_number("choose", self.choose, "[0, 1]")
        check_number("enforce", self.enforce, "[0, 1]")
        if self.choose > self.enforce:
            raise ValueError(f"choose={self.choose} must not be above enforce={self.enforce}.")
        check_number("lasso", self.lasso, "[0, inf)")

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            layer.set_mask(torch.ones((), dtype=torch.bool, device=layer.weight.device))

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        if step <= self.choose * run.total_steps:
            return
        for layer in layers:
            if layer.weight.grad is None:
                continue
            state = layer.state.schedule_state
            if "enforced" in state:
                mask_gradients([layer])
            elif "patterns" in state:
                run.check_gradient(layer.weight)
                self._add_lasso(layer, layer.weight.grad)
            else:
                self._select(layer)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        if step < self.enforce * run.total_steps:
            return
        chosen = [layer for layer in layers if "patterns" in layer.state.schedule_state]
        for layer in chosen:
            if "enforced" not in layer.state.schedule_state:
                state = layer.state.schedule_state
                state["enforced"] = True
                layer.set_mask(state["patterns"] & state["kernels"])
        hold_at_zero(chosen, run)

    def _select(self, layer: PrunedLayer) -> None:
        weight, rule = layer.weight_as_conv().detach(), layer.strategy.output
        scores = (masks.widened(weight) * layer.gradient_as_conv()).square()
        layer.state.schedule_state["patterns"] = pattern_mask(scores, rule.patterns)
        layer.state.schedule_state["kernels"] = connectivity_mask(scores, rule.connectivity)

    def _add_lasso(self, layer: PrunedLayer, gradient: Tensor) -> None:
        weight, state = layer.weight_as_conv().detach(), layer.state.schedule_state
        for kept in (state["patterns"], state["kernels"]):
            pruned = masks.widened(weight) * ~kept.to(weight.device)
            norms = (kernel_scores(pruned.square()) + 1e-8).sqrt()
            pull = (pruned / norms).to(weight.dtype)
            gradient.add_(layer.shaped_as_weight(pull), alpha=self.lasso)

    def __str__(self) -> str:
        times = f"chosen after {self.choose:.4g}, enforced after {self.enforce:.4g} of the training"
        return f"masks {times}, group lasso {self.lasso:g}"


@register_strategy("clicktrain")
def clicktrain(
    patterns: int = 4,
    connectivity: float = 0.375,
    choose: float = 35 / 95,
    enforce: float = 78 / 95,
    lasso: float = 2.5e-4,
) -> Strategy:
    """In the end Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, dW and momentum masked by M."""
    return Strategy(
        "clicktrain",
        output=KernelPatterns(patterns=patterns, connectivity=connectivity),
        grad_input=SameAsOutput(),
        min_in_channels=4,
        schedule=PatternSelection(choose, enforce, lasso),
    )
