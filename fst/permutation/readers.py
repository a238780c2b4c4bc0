"""Which layers read a set of channels in groups of N:M, and which sets may get another order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fst.basics.errors import UsageError
from fst.layers.modules import SparseLayer
from fst.permutation.axes import Axis
from fst.permutation.graph import ModelAxes
from fst.permutation.search import Reader
from fst.rules.rule import Pattern


class Reading(NamedTuple):
    """A converted layer that reads a family of channels.

    Attributes:
        name, layer: of the layer.
        start: which of its input channels is the family's first.
        n, m: how many of how many input channels it keeps.
    """

    name: str
    layer: SparseLayer
    start: int
    n: int
    m: int

    def magnitudes(self, channels: int) -> Reader:
        """Of the layer's weights of the family's first ``channels``."""
        weight = self.layer.weight_as_conv().detach().narrow(1, self.start, channels)
        return Reader(weight.abs().float().transpose(0, 1).flatten(1).contiguous(), self.n)


def pruned_along_channels(layer: SparseLayer) -> Pattern | None:
    """The N:M by magnitude along input channels that a layer's weight has now; None without."""
    rule = layer.acting.output
    pattern = None if rule is None else rule.pattern("output")
    is_magnitude = pattern is not None and pattern.rule == "magnitude" and pattern.n < pattern.m
    return pattern if is_magnitude else None


def find_readings(
    layers: Mapping[str, SparseLayer], axes: ModelAxes
) -> tuple[dict[int, list[Reading]], dict[str, str]]:
    """The families that may get another order, and who reads them.

    Families are pinned where groups of a layer would not be made of them alone.

    Returns:
        Family -> its readings, and name of each layer pruned along channels -> why some of its
        channels stay in place, "" where all move.
    """
    inputs = {name: _input_axis(name, layer, axes) for name, layer in layers.items()}
    patterns = {name: pruned_along_channels(layer) for name, layer in layers.items()}
    found: dict[int, list[Reading]] = {}
    for name, layer in layers.items():
        rule, pattern, start = layer.acting.output, patterns[name], 0
        for piece in inputs[name]:
            if pattern is not None:
                reading = Reading(name, layer, start, pattern.n, pattern.m)
                others = found.setdefault(piece.family, [])
                others.append(reading)
                if piece.inner > 1:
                    axes.axes.pin((piece,), f"{name!r} reads them flattened with their positions")
                elif start % pattern.m:
                    axes.axes.pin((piece,), f"they begin within a group of {name!r}")
                elif others[0].m != pattern.m:
                    reason = (
                        f"groups of {others[0].m} in {others[0].name!r}, {pattern.m} in {name!r}"
                    )
                    axes.axes.pin((piece,), reason)
            elif rule is not None and rule.weight_groups is not None:
                axes.axes.pin((piece,), f"{name!r} is pruned by {rule}")
            start += axes.axes.length((piece,))
    stays = {
        name: _reasons(inputs[name], axes, pattern.m)
        for name, pattern in patterns.items()
        if pattern is not None
    }
    return {f: r for f, r in found.items() if not _reason(f, axes, r[0].m)}, stays


def _input_axis(name: str, layer: SparseLayer, axes: ModelAxes) -> Axis:
    weight = layer._parameters.get("weight")
    if weight is None:
        raise UsageError(
            f"permute: the weight of layer {name!r} is computed from other parameters: remove its "
            "parametrization first."
        )
    return axes.of(weight)[1]


def _reasons(axis: Axis, axes: ModelAxes, m: int) -> str:
    return "; ".join(dict.fromkeys(filter(None, (_reason(f, axes, m) for f, _ in axis))))


def _reason(family: int, axes: ModelAxes, m: int) -> str:
    """Why a family stays in place; "" if it may move."""
    size = axes.axes.size(family)
    return axes.axes.pinned(family) or (f"{size} channels: fewer than two groups" * (size < 2 * m))


def kept_and_total(layer: SparseLayer) -> tuple[float, float]:
    """Σ|w| of what a layer's rule keeps, and of all its weights, in float64."""
    magnitudes: Tensor = layer.weight_as_conv().detach().abs()
    kept = torch.where(layer.rule_mask(), magnitudes, 0)
    return kept.sum(dtype=torch.float64).item(), magnitudes.sum(dtype=torch.float64).item()
