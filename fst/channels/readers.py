"""Which layers read a set of channels in groups of N:M, and which sets may get another order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fst.basics.errors import UsageError
from fst.channels.axes import Axis
from fst.channels.graph import ModelAxes
from fst.channels.search import Reader
from fst.layers.modules import SparseLayer
from fst.rules.rule import Pattern


class Reading(NamedTuple):
    """A converted layer that reads a family of channels, which stand side by side in it.

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
) -> tuple[dict[Axis, list[Reading]], dict[str, str]]:
    """The families that may get another order, and who reads them.

    Families are pinned where groups of a layer would not be made of them alone.

    Returns:
        Family -> its readings, and name of each layer pruned along channels -> why some of its
        channels stay in place, "" where all move.
    """
    inputs = {name: _input_axis(name, layer, axes) for name, layer in layers.items()}
    patterns = {name: pruned_along_channels(layer) for name, layer in layers.items()}
    stored = (axis for _, own in axes for axis in own)
    families = {channel: family for family in axes.families(stored) for channel in family}
    found: dict[Axis, list[Reading]] = {}
    for name, layer in layers.items():
        rule, pattern, start = layer.acting.output, patterns[name], 0
        for family, run in itertools.groupby(inputs[name], families.__getitem__):
            channels = tuple(run)
            if pattern is not None:
                reason = ""
                for at in range(start, start + len(channels), len(family)):
                    reading = Reading(name, layer, at, pattern.n, pattern.m)
                    found.setdefault(family, []).append(reading)
                    reason = reason or _obstacle(reading, found[family][0])
                if channels != family * (len(channels) // len(family)):
                    reason = f"{name!r} reads them flattened with their positions"
                if reason:
                    axes.pin(family, reason)
            elif rule is not None and rule.weight_groups is not None:
                axes.pin(family, f"{name!r} is pruned by {rule}")
            start += len(channels)

    def reason_of(channel: int, m: int) -> str:
        size = len(families[channel])
        few = f"{size} channels: fewer than two groups" if size < 2 * m else ""
        return axes.pinned(channel) or few

    stays = {}
    for name, pattern in patterns.items():
        if pattern is not None:
            reasons = (reason_of(channel, pattern.m) for channel in inputs[name])
            stays[name] = "; ".join(dict.fromkeys(filter(None, reasons)))
    return {f: r for f, r in found.items() if not reason_of(f[0], r[0].m)}, stays


def _obstacle(reading: Reading, first: Reading) -> str:
    """Why a family stays in place, which a layer reads and another one reads first."""
    if reading.start % reading.m:
        return f"they begin within a group of {reading.name!r}"
    if reading.m != first.m:
        return f"groups of {first.m} in {first.name!r}, {reading.m} in {reading.name!r}"
    return ""


def _input_axis(name: str, layer: SparseLayer, axes: ModelAxes) -> Axis:
    weight = layer._parameters.get("weight")
    if weight is None:
        raise UsageError(
            f"permute: the weight of layer {name!r} is computed from other parameters: remove its "
            "parametrization first."
        )
    return axes.of(weight)[1]


def kept_and_total(layer: SparseLayer) -> tuple[float, float]:
    """Σ|w| of what a layer's rule keeps, and of all its weights, in float64."""
    magnitudes: Tensor = layer.weight_as_conv().detach().abs()
    kept = torch.where(layer.rule_mask(), magnitudes, 0)
    return kept.sum(dtype=torch.float64).item(), magnitudes.sum(dtype=torch.float64).item()
