"""The measurements of a benchmark, as a document and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fst.backends import Decision
from fst.backends.timing import geometric_mean
from fst.basics.text import counted_as
from fst.lab.benchmark.layers import PLAIN, PRUNING, LayerTimes
from fst.lab.benchmark.steps import StepTimes
from fst.lab.document import Document, Table
from fst.rules.strategy import GEMMS

PARTS = (PRUNING, *GEMMS)


@dataclass
class Measurements:
    """The measurements; empty where they were skipped."""

    layers: list[LayerTimes] = field(default_factory=list)
    steps: StepTimes | None = None


def describe(header: Mapping[str, Any], found: Measurements) -> Document:
    """The report."""
    made = [[key, str(value)] for key, value in header.items() if key != "command"]
    tables = [Table("measured with", ["what", "value"], made)]
    tables += _layer_tables(found) if found.layers else []
    notes: list[str] = []
    if found.steps is not None:
        tables.append(_step_table(found.steps))
        notes = [f"{name}: not run. {why}" for name, why in found.steps.failed.items()]
    return Document(
        "Times side by side",
        command=header["command"],
        tables=tables,
        notes=notes,
    )


def _layer_tables(found: Measurements) -> list[Table]:
    layers = found.layers
    tables = []
    for gemm in GEMMS:
        titles = ["layer", "n", "torch ms (quartiles)", *_strategies(layers, gemm)]
        title = f"{gemm}: dense time over strategy's time"
        tables.append(Table(title, titles, _ratio_rows(layers, gemm), _rounds(layers[0].rounds)))
    chosen = _decision_rows(layers)
    if chosen:
        titles = ["GEMM", "operation", "backend", "strategies", "layers", "why", "measured ms"]
        tables.append(Table("backends chosen, and why", titles, chosen))
    return tables


def _rounds(count: int) -> str:
    return f"Medians, and quartiles in brackets, of {counted_as(count, 'round', 'rounds')}."


def _strategies(layers: Sequence[LayerTimes], gemm: str) -> list[str]:
    return [
        n for n in dict.fromkeys(n for layer in layers for n in layer.times[gemm]) if n != PLAIN
    ]


def _ratio_rows(layers: Sequence[LayerTimes], gemm: str) -> list[list[Any]]:
    rows: list[list[Any]] = []
    strategies = _strategies(layers, gemm)
    for layer in layers:
        ratios = [
            "{:.2f} ({:.2f} to {:.2f})".format(*layer.ratios(gemm, name))
            if name in layer.times[gemm]
            else ""
            for name in strategies
        ]
        plain = layer.times[gemm][PLAIN]
        rows.append([layer.shape, layer.count, plain, *ratios])
    groups = {
        "3x3, geometric mean": [x for x in layers if x.shape.kernel == (3, 3)],
        "all, geometric mean": layers,
    }
    for title, group in groups.items():
        if not group:
            continue
        means = []
        for name in strategies:
            timed = [layer.ratio(gemm, name) for layer in group if name in layer.times[gemm]]
            means.append(f"**{geometric_mean(timed):.2f}**" if timed else "")
        rows.append([f"**{title}**", "", "", *means])
    return rows


def _milliseconds(value: float) -> str:
    """With three significant digits, but no fewer than the whole milliseconds."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _decision_rows(layers: Sequence[LayerTimes]) -> list[list[str]]:
    """Equal decisions share a row."""
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for layer in layers:
        for gemm, by_strategy in layer.decisions.items():
            for strategy, by_operation in by_strategy.items():
                for operation, decision in by_operation.items():
                    times = _times(decision)
                    key = (gemm, operation, decision.backend, decision.reason, times)
                    found.setdefault(key, {}).setdefault(strategy, []).append(str(layer.shape))
    rows = []
    order = sorted(found.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1:3]))
    for (gemm, operation, backend, reason, times), by_strategy in order:
        merged: dict[tuple[str, ...], list[str]] = {}
        for strategy, names in by_strategy.items():
            merged.setdefault(tuple(names), []).append(strategy)
        for names, strategies in merged.items():
            where = f"all {len(layers)}" if len(names) == len(layers) > 1 else "; ".join(names)
            rows.append([gemm, operation, backend, ", ".join(strategies), where, reason, times])
    return rows


def _times(decision: Decision) -> str:
    return ", ".join(f"{name} {_milliseconds(t)}" for name, t in decision.times.items())


def _step_table(steps: StepTimes) -> Table:
    titles = ["strategy", "ms (quartiles)", "dense time / time"]
    titles += ["host ms (quartiles)"] if steps.host else []
    titles.append("S(W) + S(Wᵀ), share of step")
    rows = []
    for name, timing in steps.step.items():
        row = [name, timing, f"{steps.ratio(name):.3f}"]
        row += [steps.host[name]] if steps.host else []
        pruning = steps.pruning.get(name)
        rows.append([*row, f"{pruning.median / timing.median:.2%}" if pruning else ""])
    title = "training step (forward, backward, SGD)"
    return Table(title, titles, rows, _rounds(steps.rounds))


def as_json(header: Mapping[str, Any], found: Measurements) -> dict[str, Any]:
    """The report as plain data; times in milliseconds."""
    steps: dict[str, Any] = {}
    if found.steps is not None:
        parts = found.steps._asdict()
        plain = ("rounds", "failed")
        steps = {name: v if name in plain else _plain(v) for name, v in parts.items()}
    return {
        "header": dict(header),
        "layers": [_layer_json(layer) for layer in found.layers],
        "steps": steps,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value._asdict() for name, value in values.items()}


def _layer_json(layer: LayerTimes) -> dict[str, Any]:
    return {
        "layer": str(layer.shape),
        "count": layer.count,
        "rounds": layer.rounds,
        "times": {gemm: _plain(times) for gemm, times in layer.times.items()},
        "decisions": {
            gemm: {strategy: _plain(decided) for strategy, decided in by_strategy.items()}
            for gemm, by_strategy in layer.decisions.items()
        },
    }
