"""The measurements of a benchmark: taken, as a document, and as plain data."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fst import get_strategy
from fst.backends.timing import Timing, geometric_mean
from fst.basics.text import counted_as
from fst.cli.options.lab import ROUNDS, STEP_SECONDS
from fst.lab.benchmark.layers import PLAIN, LayerTimes, layer_shapes, time_layer
from fst.lab.benchmark.steps import StepTimes, candidates, time_steps
from fst.lab.document import Document
from fst.lab.model import Training
from fst.rules.strategy import GEMMS, Strategy


@dataclass
class Measurements:
    """The measurements; empty where they were skipped."""

    layers: list[LayerTimes] = field(default_factory=list)
    steps: StepTimes | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in milliseconds."""
        steps = {} if self.steps is None else _plain(self.steps)
        return {"layers": [_of_layer(layer) for layer in self.layers], "steps": steps}


def measure(training: Training, options: argparse.Namespace, found: Measurements) -> None:
    """Add everything that --measure names to ``found``."""
    strategies = {text: get_strategy(text) for text in options.strategies}
    wanted = options.measure
    if "layers" in wanted:
        time_layers(training, options, strategies, found)
    if {"steps", "compiled"} & set(wanted):
        forced = options.force_backends
        made = candidates(training, strategies, compiled="compiled" in wanted, forced=forced)
        seconds = math.inf if options.repeats else STEP_SECONDS / len(made.ready)
        found.steps = time_steps(made, training, options.repeats or ROUNDS, seconds)


def time_layers(
    training: Training,
    options: argparse.Namespace,
    strategies: dict[str, Strategy],
    found: Measurements,
) -> None:
    """The times of each distinct layer under the strategies that make it sparse."""
    kinds = training.selection.get("layers", "conv")
    shapes = layer_shapes(training.model, lambda: training.loss(training.model), kinds)
    converted = {name: training.converted(strategy) for name, strategy in strategies.items()}
    repeats, dtype = options.repeats or ROUNDS, getattr(torch, options.dtype)
    for index, shape in enumerate(shapes, 1):
        sparse = {n: s for n, s in strategies.items() if converted[n].intersection(shape.names)}
        print(f"layer {index} of {len(shapes)}: {shape} …", file=sys.stderr, flush=True)
        times = time_layer(shape, sparse, device=options.device, dtype=dtype, repeats=repeats)
        found.layers.append(times)


def describe(header: Mapping[str, Any], found: Measurements) -> Document:
    """The report."""
    document = Document("Times of training steps and layers", command=header["command"])
    made = [[key, str(value)] for key, value in header.items() if key != "command"]
    document.add_table("measured with", ["what", "value"], made)
    if found.layers:
        _add_layers(document, found.layers)
    if found.steps is not None:
        rows = [[n, time, f"{found.steps.ratio(n):.3f}"] for n, time in found.steps.step.items()]
        titles = ["strategy", "ms (quartiles)", "dense time / time"]
        title, rounds = "training step (forward, backward, SGD)", _rounds(found.steps.rounds)
        document.add_table(title, titles, rows, rounds)
        document.notes.extend(f"{n}: not run. {why}" for n, why in found.steps.failed.items())
    return document


def _add_layers(document: Document, layers: Sequence[LayerTimes]) -> None:
    names = dict.fromkeys(name for layer in layers for name in layer.times[GEMMS[0]])
    strategies = [name for name in names if name != PLAIN]
    titles = ["layer", "n", "torch ms (quartiles)", *strategies]
    for gemm in GEMMS:
        title, rows = f"{gemm}: dense time over strategy's time", _ratios(layers, gemm, strategies)
        document.add_table(title, titles, rows, _rounds(layers[0].rounds))
    if chosen := _decisions(layers):
        titles = ["GEMM", "operation", "backend", "why", "measured ms", "strategies and layers"]
        document.add_table("backends chosen, and why", titles, chosen)


def _rounds(count: int) -> str:
    return f"Medians, and quartiles in brackets, of {counted_as(count, 'round', 'rounds')}."


def _ratios(layers: Sequence[LayerTimes], gemm: str, strategies: list[str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    ratios: dict[str, list[Timing]] = {name: [] for name in strategies}
    for layer in layers:
        row = [layer.shape, len(layer.shape.names), layer.times[gemm][PLAIN]]
        for name in strategies:
            if name not in layer.times[gemm]:
                row.append(None)
                continue
            ratios[name].append(layer.ratios(gemm, name))
            row.append("{:.2f} ({:.2f} to {:.2f})".format(*ratios[name][-1]))
        rows.append(row)
    means = [f"**{geometric_mean(r.median for r in found):.2f}**" for found in ratios.values()]
    return [*rows, ["**geometric mean**", None, None, *means]]


def _decisions(layers: Sequence[LayerTimes]) -> list[list[str]]:
    """Equal decisions share a row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        for gemm, by_strategy in layer.decisions.items():
            for strategy, by_operation in by_strategy.items():
                for operation, decision in by_operation.items():
                    times = ", ".join(f"{name} {t:.3g}" for name, t in decision.times.items())
                    row = (gemm, operation, decision.backend, decision.reason, times)
                    found.setdefault(row, []).append(f"{strategy}: {layer.shape}")
    rows = sorted(found.items(), key=lambda item: (GEMMS.index(item[0][0]), item[0][1:3]))
    return [[*row, "; ".join(where)] for row, where in rows]


def _of_layer(layer: LayerTimes) -> dict[str, Any]:
    return {
        "layer": str(layer.shape),
        "count": len(layer.shape.names),
        **{name: _plain(getattr(layer, name)) for name in ("rounds", "times", "decisions")},
    }


def _plain(value: Any) -> Any:
    """Named tuples, in mappings too, as mappings."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    return {key: _plain(v) for key, v in value.items()} if isinstance(value, dict) else value
