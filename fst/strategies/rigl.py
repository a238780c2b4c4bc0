"""RigL: sparse from start to end; weak connections are dropped, promising ones grown.

Paper: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, Algorithm 1: every
ΔT = 100 steps until 3/4 of the training, the share α/2·(1 + cos(πt/T_end)), α = 0.3, of each
layer's connections is replaced, and that step updates no parameter. Official code:
github.com/google-research/rigl, followed where the paper is silent: the first replacement is at
step 0; what is dropped may be grown again in the same step, and then keeps its value and momentum.
Its noise of 1e-5 on magnitudes is left out, so that masks are deterministic. For ResNet-50 on
ImageNet it stops after 25,000 of 32,000 steps (``end=0.78125``), and prunes the fully connected
layer, which here stays dense unless ``include`` of `fst.convert` asks for it.

``allocation``: "erk" gives layer l a density in proportion to (n_out + n_in + kh + kw) /
(n_out·n_in·kh·kw), at most 1; "uniform" gives all the same, and leaves convolutions of images
(fewer than four input channels) dense. FST's Table 3 has a sparsity of 50 %.

``n`` and ``m`` are not of the paper: masks are N:M from start to end, and connections are replaced
within their groups, as users of sparse-to-sparse training ask for hardware's patterns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fst.basics.values import check_integer, check_number, one_of
from fst.rules import masks
from fst.rules.nm import NM, SameAsOutput
from fst.rules.schedule import HeldMasks, Layers, PrunedLayer, Run, hold_at_zero
from fst.rules.strategy import Strategy
from fst.rules.weight import Unstructured
from fst.strategies.registry import register_strategy


def erk_densities(shapes: Sequence[torch.Size], density: float) -> list[float]:
    """Erdős-Rényi-Kernel densities of weights of these shapes; ``density`` over all of them."""
    sizes = [shape.numel() for shape in shapes]
    scores = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(shapes)) if i not in full]
        budget = density * sum(sizes) - sum(sizes[i] for i in full)
        factor = budget / sum(scores[i] * sizes[i] for i in rest) if rest else 0.0
        over = {i for i in rest if factor * scores[i] > 1}
        if not over:
            return [1.0 if i in full else factor * scores[i] for i in range(len(shapes))]
        full |= over


@dataclass(frozen=True)
class DropAndGrow(HeldMasks):
    """Random masks of fixed density, of which a share is replaced now and then.

    Attributes:
        interval: training steps between two replacements, ΔT.
        alpha: share of the connections that the first one replaces, α.
        end: share of the training after which masks stay, T_end / total_steps.
        allocation: "erk" or "uniform", see the module.
    """

    interval: int = 100
    alpha: float = 0.3
    end: float = 0.75
    allocation: str = "erk"
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, 1)
        check_number("alpha", self.alpha, "[0, 1)")
        check_number("end", self.end, "[0, 1]")
        one_of("allocation", self.allocation, ("erk", "uniform"))

    def start(self, layers: Layers, run: Run) -> None:
        density = layers[0].strategy.output.density
        shapes = [layer.weight_as_conv().shape for layer in layers]
        densities = [density] * len(shapes)
        if self.allocation == "erk":
            densities = erk_densities(shapes, density)
        for layer, shape, share in zip(layers, shapes, densities, strict=True):
            device = layer.weight.device
            draws = torch.rand(shape, generator=layer.seeded_generator(device), device=device)
            layer.set_mask(masks.unstructured_mask(draws, 1 - share))
        hold_at_zero(layers, run)

    def drop_fraction(self, step: int, total_steps: int) -> float:
        """α/2·(1 + cos(π·step/T_end)), and 0 from T_end on."""
        last = self.end * total_steps
        return self.alpha / 2 * (1 + math.cos(math.pi * step / last)) if step < last else 0.0

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        fraction = self.drop_fraction(step - 1, run.total_steps)
        if (step - 1) % self.interval or not fraction:
            super().before_update(layers, run, step)
            return
        for layer in layers:
            if layer.weight.grad is not None:
                self.replace(layer, fraction)
        run.skip_update()

    def replace(self, layer: PrunedLayer, fraction: float) -> None:
        """Drop the smallest share of the connections; grow as many by the gradient's magnitude."""
        weight, mask = layer.weight_as_conv().detach(), layer.state.kept_mask
        assert mask is not None  # kept from `start` on
        connections = int(mask.sum())
        replaced = int(fraction * connections)
        kept = masks.largest_mask(weight.abs().masked_fill(~mask, -1), connections - replaced)
        layer.set_mask(self.grown(layer, kept, layer.gradient_as_conv().abs(), replaced))

    def grown(self, layer: PrunedLayer, kept: Tensor, scores: Tensor, count: int) -> Tensor:
        """The mask of what is kept, and of the ``count`` others of largest scores."""
        return kept | masks.largest_mask(scores.masked_fill(kept, -1), count)

    def __str__(self) -> str:
        replaced = f"{self.alpha:g} replaced every {self.interval} steps"
        return f"{self.allocation} masks, {replaced} until {self.end:g} of the training"


@dataclass(frozen=True)
class DropAndGrowInGroups(DropAndGrow):
    """N:M from start to end: what a group of m drops, it grows in the same step."""

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            device, rule = layer.weight.device, layer.strategy.output
            drawn = replace(rule, rule="random")
            generator = layer.seeded_generator(device)
            weight = layer.weight_as_conv().detach()
            layer.set_mask(drawn.weight_mask(weight, "output", layer.conv_groups, generator))
        hold_at_zero(layers, run)

    def grown(self, layer: PrunedLayer, kept: Tensor, scores: Tensor, count: int) -> Tensor:
        """Each group grows as many as it loses."""
        first = scores.amax() + 1  # what stays is before all that could grow
        rule = layer.strategy.output
        return rule.weight_mask(scores + first * kept, "output", layer.conv_groups)

    def __str__(self) -> str:
        return super().__str__().replace("erk masks", "N:M masks")


@register_strategy("rigl")
def rigl(
    sparsity: float | None = None,
    interval: int = 100,
    alpha: float = 0.3,
    end: float = 0.75,
    allocation: str | None = None,
    n: int | None = None,
    m: int | None = None,
    group_order: str = "channel",
) -> Strategy:
    """Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, dW masked by M, except where it decides what M grows.

    Args:
        sparsity: share of the weights that is pruned; 0.5 if None.
        allocation: of the densities, "erk" (None) or "uniform".
        n, m: N:M masks instead, which have neither ``sparsity`` nor ``allocation``: connections are
            dropped and grown within groups of m along ``group_order``.
    """
    if (n is None) != (m is None):
        raise ValueError(f"n={n}, m={m}: give both, or neither.")
    if n is not None and m is not None:
        for name, value in (("sparsity", sparsity), ("allocation", allocation)):
            if value is not None:
                raise ValueError(f"{name}={value!r}: the pattern n={n}, m={m} says it already.")
        return Strategy(
            "rigl",
            output=NM("weight", n, m, group_order=group_order),
            grad_input=SameAsOutput(),
            schedule=DropAndGrowInGroups(interval, alpha, end),
        )
    if group_order != "channel":
        raise ValueError(f"group_order={group_order!r} needs n and m.")
    sparsity = 0.5 if sparsity is None else sparsity
    allocation = "erk" if allocation is None else allocation
    return Strategy(
        "rigl",
        output=Unstructured(sparsity=sparsity),
        grad_input=SameAsOutput(),
        min_in_channels=4 if allocation == "uniform" else 1,
        schedule=DropAndGrow(interval, alpha, end, allocation),
    )
