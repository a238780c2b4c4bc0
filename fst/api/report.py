"""The report of a conversion, for each layer and GEMM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from fst.backends import Decision
from fst.backends.choice import DENSE
from fst.basics.text import table
from fst.layers.coverage import NOT_CALLED, gemm_weights, shape_of
from fst.layers.modules import SparseLayer, sparse_layers
from fst.layers.table import WEIGHTS, Columns, GemmReport, LayerRow, LayerTable
from fst.ops import cpp
from fst.rules.rule import Pattern, Rule
from fst.rules.strategy import GEMMS, Strategy

NOT_COMPUTED = "not computed"
MAY_BE = "may be accelerated"
NO_CHOICE = "nothing to choose so far"
LONG = 30  # layers; in longer reports similar ones share a row
LAYERS: Columns = {
    "layer": lambda row: row.layer,
    "weight": WEIGHTS["shape"],
    "output": lambda row: row.gemms["output"].mode,
    "grad_input": lambda row: row.gemms["grad_input"].mode,
    "grad_weight": lambda row: row.gemms["grad_weight"].mode,
}


@dataclass(frozen=True)
class ConversionReport:
    """The result of `fst.convert`.

    Attributes:
        strategy: the strategy as text.
        skipped: name of each layer that was left dense -> reason.
        covered: every weight of a convolution or linear layer: N:M, exempt, or skipped.
        notes: what the conversion costs in training, in sentences.
    """

    strategy: str
    skipped: Mapping[str, str]
    covered: LayerTable = LayerTable()
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """A row for each converted layer, with its three GEMMs."""
        return tuple(row for row in self.covered.rows if row.gemms)

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def converted(self) -> dict[str, str]:
        """Name of each converted layer -> how its GEMMs are computed."""
        return {
            row.layer: "; ".join(f"{gemm} {report}" for gemm, report in row.gemms.items())
            for row in self.layers
        }

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {len(self.layers)} converted, {len(self.skipped)} skipped"]
        if self.layers:
            merged = len(self.layers) > LONG
            lines += ["", LayerTable(self.layers).text(LAYERS, merged=merged)]
            reasons = {gemm.reason: gemm.mode for row in self.layers for gemm in row.gemms.values()}
            lines += ["", *sorted(f"{mode}: {reason}" for reason, mode in reasons.items())]
        if self.covered.rows:
            lines[0] += f"; coverage {self.coverage:.1%}"
            lines += ["", str(self.covered)]
        if self.skipped:
            lines += ["", table(("skipped", "reason"), self.skipped.items())]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)


def notes_on_speed(strategy: Strategy, layers: Iterable[LayerRow], device: str) -> tuple[str, ...]:
    """Return warnings about the time of a training step."""
    if strategy.skips_zeros and device == "cpu" and (reason := cpp.missing()):
        return (
            f"The C++ kernels are missing: {reason}. Without them a CPU gains nothing from zeros, "
            "nor from sampled positions.",
        )
    modes = {gemm.mode for layer in layers for gemm in layer.gemms.values()}
    if modes & {"accelerated", MAY_BE} or "simulated" not in modes:
        return ()
    return (
        "No GEMM is accelerated: a training step takes longer than a dense one, and the zeros pay "
        "when the folded model runs on hardware that skips them.",
    )


def table_of(
    model: nn.Module, skipped: Mapping[str, str], multiply_adds: Mapping[str, int] | None = None
) -> LayerTable:
    """The table of a converted model: which weights are N:M in the output GEMM, which not, and why.

    Args:
        model: converted.
        skipped: name of each layer that was left dense -> reason.
        multiply_adds: of each weight, as `fst.layers.coverage.multiply_adds` counts them.
    """
    layers, rows = sparse_layers(model), []
    for key, weight in gemm_weights(model).items():
        name = key.rpartition(".")[0]
        if name in layers:
            row = describe_layer(layers[name])
            row = replace(row, gemms={}) if name in skipped else row  # converted before
        else:
            why = skipped.get(key) or skipped.get(name) or "a bare Parameter, which is no layer"
            row = LayerRow(key, shape_of(weight), reason=f"skipped: {why}")
        macs = None if multiply_adds is None else multiply_adds[key]
        reason = NOT_CALLED if name in layers and macs == 0 else row.reason
        rows.append(replace(row, name=key, reason=reason, multiply_adds=macs))
    return LayerTable(tuple(rows))


def describe_layer(layer: SparseLayer) -> LayerRow:
    """Per GEMM of a converted layer: dense, simulated or accelerated, and why.

    Args:
        layer: before a backward pass or after it, which tells more.
    """
    gemms, rule = {gemm: _describe(layer, gemm) for gemm in GEMMS}, layer.current_strategy.output
    groups = None if rule is None else rule.weight_groups
    name = f"{layer.layer_name}.weight".lstrip(".")
    return LayerRow(name, tuple(layer.weight.shape), groups, gemms=gemms)


def _describe(layer: SparseLayer, gemm: str) -> GemmReport:
    strategy, known = layer.strategy, layer.state.record.decisions
    decision, rule = known.get(gemm), strategy.rule(gemm)
    name = "" if rule is None else str(rule)
    if gemm == "grad_weight" and not layer.weight.requires_grad:
        return GemmReport(NOT_COMPUTED, "", "the weight needs no gradient")
    if gemm == "grad_input" and not decision and known.get("grad_weight"):
        return GemmReport(NOT_COMPUTED, "", "the input needs no gradient")
    if decision is not None and decision.skipped:
        reason = f"{decision.skipped}, {_gain(decision)}"
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
    return f"{decision.reason} ({decision.measured} ms)" if decision.times else decision.reason


def _gain(decision: Decision) -> str:
    """The chosen backend's time and the dense one's where both were measured, or the reason."""
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
                row = (decision.backend, decision.reason, decision.measured)
            rows.setdefault((operation, *row), []).append(name)
    shown = [
        (*row[:2], _some(names, len(layers)), *row[2:])
        for row, names in sorted(rows.items(), key=lambda item: item[0][0])
    ]
    return table(("operation", "backend", "layers", "why", "measured ms"), shown)


def _some(names: list[str], of: int, limit: int = 3) -> str:
    if len(names) == of > 1:
        return f"all {of}"
    more = [f"{len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])
