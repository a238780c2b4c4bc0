"""The report of a conversion, for each layer and GEMM."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from fst.backends import Decision
from fst.backends.choice import DENSE
from fst.basics.text import table
from fst.layers.coverage import (
    NOT_CALLED,
    Coverage,
    CoveredWeight,
    gemm_weights,
    shape_of,
)
from fst.layers.modules import SparseLayer, sparse_layers
from fst.ops import cpp
from fst.rules.rule import Pattern, Rule
from fst.rules.strategy import GEMMS, Strategy

NOT_COMPUTED = "not computed"
MAY_BE = "may be accelerated"
NO_CHOICE = "nothing to choose so far"
LONG = 30  # layers; longer reports are summed up by module, and similar layers share a row


class GemmReport(NamedTuple):
    """Computation of one GEMM of a layer.

    Attributes:
        mode: "dense" (nothing pruned), "simulated" (dense arithmetic on pruned values, so no time
            is saved), "accelerated" (fewer multiply-adds are done), "may be accelerated" (the first
            backward pass tells) or "not computed".
        rule: what is pruned; "" where dense.
        reason: why it is so.
        decision: which backend computed it last, and why; None before that, and where there is
            nothing to choose (see `backends_table`).
    """

    mode: str
    rule: str
    reason: str
    decision: Decision | None = None

    def __str__(self) -> str:
        return f"{self.mode}: {self.rule}" if self.rule else self.mode


class LayerReport(NamedTuple):
    """A converted layer: its name, the shape of its weight, and its three GEMMs."""

    name: str
    shape: tuple[int, ...]
    gemms: dict[str, GemmReport]

    def __str__(self) -> str:
        return "; ".join(f"{gemm} {report}" for gemm, report in self.gemms.items())


@dataclass
class ConversionReport:
    """The result of `fst.convert`.

    Attributes:
        strategy: the strategy, in words.
        layers: one `LayerReport` for each converted layer.
        skipped: name of each layer that was left dense -> reason.
        covered: every weight of a convolution or linear layer: N:M, exempt, or skipped.
        notes: what the conversion costs in training, in sentences.
    """

    strategy: str
    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    covered: Coverage = Coverage()
    notes: list[str] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def converted(self) -> dict[str, str]:
        """Name of each converted layer -> how its GEMMs are computed."""
        return {layer.name: str(layer) for layer in self.layers}

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {len(self.layers)} converted, {len(self.skipped)} skipped"]
        is_long = len(self.layers) > LONG
        if is_long:
            lines += ["", self.by_module()]
        if self.layers:
            lines += ["", self.by_layer(merged=is_long)]
            reasons = {r.reason: r.mode for layer in self.layers for r in layer.gemms.values()}
            lines += ["", *sorted(f"{mode}: {reason}" for reason, mode in reasons.items())]
        if self.covered.weights:
            lines[0] += f"; coverage {self.coverage:.1%}"
            lines += ["", str(self.covered)]
        if self.skipped:
            lines += ["", table(("skipped", "reason"), self.skipped.items())]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def by_module(self) -> str:
        """Table: per module of the model, how many layers are converted, and how."""
        groups = group_names([*(layer.name for layer in self.layers), *self.skipped])
        rows = []
        for group in dict.fromkeys(groups.values()):
            layers = [layer for layer in self.layers if groups[layer.name] == group]
            skipped = sum(groups[name] == group for name in self.skipped)
            modes = [Counter(layer.gemms[gemm].mode for layer in layers) for gemm in GEMMS]
            cells = [", ".join(f"{n} {mode}" for mode, n in m.most_common()) for m in modes]
            rows.append((group, len(layers), skipped, *cells))
        return table(("module", "converted", "skipped", *GEMMS), rows)

    def by_layer(self, *, merged: bool = False) -> str:
        """Table of the converted layers.

        ``merged``: layers whose names differ in numbers alone share a row if all else is equal.
        """
        rows: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            name = re.sub(r"\d+", "*", layer.name) if merged else layer.name
            modes = (layer.gemms[gemm].mode for gemm in GEMMS)
            rows.setdefault((name, "x".join(map(str, layer.shape)), *modes), []).append(layer.name)
        named = [(_common_name(names), *row[1:]) for row, names in rows.items()]
        return table(("layer", "weight", *GEMMS), named)


def notes_on_speed(strategy: Strategy, layers: Iterable[LayerReport], device: str) -> list[str]:
    """Return warnings about the time of a training step."""
    if strategy.skips_zeros and device == "cpu" and (reason := cpp.missing()):
        return [
            f"The C++ kernels are missing: {reason}. Without them a CPU gains nothing from zeros, "
            "nor from sampled positions."
        ]
    modes = {gemm.mode for layer in layers for gemm in layer.gemms.values()}
    if modes & {"accelerated", MAY_BE} or "simulated" not in modes:
        return []
    return [
        "No GEMM is accelerated: a training step takes longer than a dense one, and the zeros pay "
        "when the folded model runs on hardware that skips them."
    ]


def coverage_of(
    model: nn.Module, skipped: Mapping[str, str], multiply_adds: Mapping[str, int] | None = None
) -> Coverage:
    """Which weights of a converted model are N:M in the output GEMM, which not, and why.

    Args:
        model: converted.
        skipped: name of each layer that was left dense -> reason.
        multiply_adds: of each weight, as `fst.layers.coverage.multiply_adds` counts them.
    """
    layers, found = sparse_layers(model), []
    for key, weight in gemm_weights(model).items():
        name = key.rpartition(".")[0]
        macs = None if multiply_adds is None else multiply_adds[key]
        groups, reason = None, ""
        if name in layers:
            rule = layers[name].acting.output
            groups = None if rule is None else rule.weight_groups
            if macs == 0:
                reason = NOT_CALLED
        else:
            why = skipped.get(key) or skipped.get(name) or "a bare Parameter, which is no layer"
            reason = f"skipped: {why}"
        found.append(CoveredWeight(key, shape_of(weight), groups, reason, multiply_adds=macs))
    return Coverage(tuple(found))


def _common_name(names: list[str]) -> str:
    """One name for names that differ in numbers alone: those numbers become "*"."""
    if len(names) == 1:
        return names[0]
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    common = "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
    return f"{common} ({len(names)} layers)"


def group_names(names: Iterable[str]) -> dict[str, str]:
    """Layer name -> the module of the model that it belongs to.

    That is the first part of the name ("backbone"), after any part that all names share.
    """
    paths = {name: name.split(".") for name in names}
    depth = 0
    while (
        len({tuple(path[: depth + 1]) for path in paths.values()}) == 1
        and min(map(len, paths.values())) > depth + 1
    ):
        depth += 1
    return {name: ".".join(path[: depth + 1]) for name, path in paths.items()}


def describe_layer(layer: SparseLayer) -> LayerReport:
    """Per GEMM of a converted layer: dense, simulated or accelerated, and why.

    Whether grad_input is computed depends on the model's input, see `fst.lab.analysis`.

    Args:
        layer: before a backward pass or after it, which tells more.
    """
    gemms = {gemm: _describe(layer, gemm) for gemm in GEMMS}
    return LayerReport(layer.layer_name, tuple(layer.weight.shape), gemms)


def _describe(layer: SparseLayer, gemm: str) -> GemmReport:
    strategy, known = layer.strategy, layer.state.record.decisions
    decision, rule = known.get(gemm), strategy.rule(gemm)
    name = "" if rule is None else str(rule)
    if gemm == "grad_weight" and not layer.weight.requires_grad:
        return GemmReport(NOT_COMPUTED, "", "the weight needs no gradient")
    if gemm == "grad_input" and not decision and known.get("grad_weight"):
        return GemmReport(NOT_COMPUTED, "", "the input needs no gradient")
    if decision is not None and decision.left_out:
        reason = f"{decision.left_out}, {_gain(decision)}"
        return GemmReport("accelerated", name, reason, decision)
    prunes_values = rule is not None and not rule.samples and not rule.acceleration
    if rule and prunes_values and (pattern := _pattern_that_keeps_all(layer, rule, gemm)):
        reason = f"the reduction axis has at most n={pattern.n} channels: all are kept"
        return GemmReport("dense", name, reason, decision)
    if decision is None and ((rule is not None and not prunes_values) or _may_skip_zeros(layer)):
        return GemmReport(MAY_BE, name, "the first step tells which backend is the fastest")
    if rule is None or not prunes_values:
        reason = "the strategy prunes nothing in this GEMM" if decision is None else _why(decision)
        return GemmReport("dense", name, reason, decision)
    reason = rule.simulation if decision is None else f"{rule.simulation}; {_why(decision)}"
    return GemmReport("simulated", name, reason, decision)


def _may_skip_zeros(layer: SparseLayer) -> bool:
    """True where backends may leave zeros out of the layer's products."""
    weight = layer.weight
    on_cpu = weight.device.type == "cpu" and weight.dtype != torch.float64
    return layer.strategy.skips_zeros and on_cpu and not cpp.missing()


def _why(decision: Decision) -> str:
    """The reason of a decision, with the times where there are some."""
    return f"{decision.reason} ({_times(decision)} ms)" if decision.times else decision.reason


def _gain(decision: Decision) -> str:
    """The chosen backend's time beside the dense one's where both were measured, or the reason."""
    mine, dense = decision.times.get(decision.backend), decision.times.get(DENSE)
    if mine is None or dense is None:
        return _why(decision)
    return f"{mine:.3g} ms instead of {dense:.3g}"


def _pattern_that_keeps_all(layer: SparseLayer, rule: Rule, gemm: str) -> Pattern | None:
    """The rule's N:M, if no group of M is longer than N."""
    outputs, channels = layer.weight.shape[:2]
    axis = {"output": channels, "grad_input": outputs // layer.conv_groups}
    pattern = rule.pattern(gemm)
    return pattern if pattern is not None and axis[gemm] <= pattern.n else None


def modes(model: nn.Module) -> str:
    """Count the layers by how each GEMM is computed, in one line; `backends_table` has them all."""
    layers = [describe_layer(layer) for layer in sparse_layers(model).values()]
    counts = {gemm: Counter(layer.gemms[gemm].mode for layer in layers) for gemm in GEMMS}
    return "; ".join(
        f"{gemm}: {', '.join(f'{count} {mode}' for mode, count in sorted(found.items()))}"
        for gemm, found in counts.items()
    )


def backends_table(model: nn.Module) -> str:
    """Table: which backend computed each operation of the converted layers last, and why.

    Call it after a training step; layers for which all is equal share a row. The times are those
    that the autotuner measured. An operation that had nothing to choose is computed by torch.
    Compiled code decides when it is compiled and is not in the table.
    """
    layers = sparse_layers(model)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, layer in layers.items():
        reports = describe_layer(layer).gemms
        computed = [gemm for gemm, report in reports.items() if report.mode != NOT_COMPUTED]
        for operation in dict.fromkeys([*computed, *layer.state.record.decisions]):
            decision = layer.state.record.decisions.get(operation)
            row = ("torch", NO_CHOICE, "")
            if decision is not None:
                row = (decision.backend, decision.reason, _times(decision))
            rows.setdefault((operation, *row), []).append(name)
    shown = [
        (*row[:2], _some(names, len(layers)), *row[2:])
        for row, names in sorted(rows.items(), key=lambda item: item[0][0])
    ]
    return table(("operation", "backend", "layers", "why", "measured ms"), shown)


def _times(decision: Decision) -> str:
    return ", ".join(f"{name} {time:.3g}" for name, time in decision.times.items())


def _some(names: list[str], of: int, limit: int = 3) -> str:
    if len(names) == of > 1:
        return f"all {of}"
    more = [f"{len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])
