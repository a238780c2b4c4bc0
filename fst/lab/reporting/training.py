"""A document about training runs: their last scalars, what differs between them, their curves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fst.lab.reporting.document import Cell, Document, Figure, Table
from fst.lab.reporting.figures import draw_curves, figure, legend_below, save
from fst.lab.reporting.runs import RunLog, flatten, read_run

SCALARS = ("loss", "density", "mask_flip_rate")
LEGEND_INCHES = 0.22


def describe_runs(folders: Sequence[Path], drawings: Path) -> Document:
    """Compare the runs in ``folders``; figures are written to ``drawings``.

    Raises:
        ValueError: a folder holds no run.
    """
    logs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    metrics = sorted({name for log in logs.values() for name in log.validation})
    scalars = [name for name in SCALARS if any(name in log.training for log in logs.values())]
    x_label = next(iter(logs.values())).x_label
    columns = ["run", "strategy", x_label, *metrics, *(f"training {name}" for name in scalars)]
    rows: list[list[Cell]] = []
    for name, log in logs.items():
        position = max((max(curve) for curve in log.training.values() if curve), default=None)
        row: list[Cell] = [name, _strategy(log), position]
        row += [_last(log.validation.get(metric)) for metric in metrics]
        rows.append(row + [_last(log.training.get(scalar)) for scalar in scalars])
    tables = [Table("Last values", columns, rows, "After the last validation and epoch logged.")]
    differences = _differences(logs)
    if differences is not None:
        tables.append(differences)
    return Document(
        title="Training runs",
        tables=tables,
        figures=_figures(logs, metrics, x_label, drawings),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The paths without what they have in common at their beginning."""
    paths = [str(folder.resolve()) for folder in folders]
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common) for path in paths]


def _strategy(log: RunLog) -> str:
    sparsity = dict(log.config.get("sparsity") or {})
    name = str(sparsity.pop("strategy", "–"))
    return ", ".join([name, *(f"{key}={value}" for key, value in sparsity.items())])


def _last(curve: Mapping[int, float] | None) -> float | None:
    return curve[max(curve)] if curve else None


def _differences(logs: Mapping[str, RunLog]) -> Table | None:
    """Return a table of the options in which the configs differ."""
    flat = {name: flatten(log.config) for name, log in logs.items()}
    keys = sorted(set().union(*flat.values()) - {"work_dir", "load_from", "resume"})
    keys = [key for key in keys if len({_shown(config.get(key)) for config in flat.values()}) > 1]
    if not keys:
        return None
    rows: list[list[Cell]] = [[key, *(_shown(c.get(key)) for c in flat.values())] for key in keys]
    return Table("Differences between the configs", ["key", *flat], rows, folded=True)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _figures(
    logs: Mapping[str, RunLog], metrics: Sequence[str], x_label: str, folder: Path
) -> list[Figure]:
    panels = {
        metric: {n: log.validation.get(metric) for n, log in logs.items()} for metric in metrics
    }
    panels["training loss"] = {name: log.training.get("loss") for name, log in logs.items()}
    figures = []
    for number, (title, found) in enumerate(panels.items(), 1):
        curves = {name: [curve] for name, curve in found.items() if curve}
        if not curves:
            continue
        with figure(3.2 + LEGEND_INCHES * len(curves)) as (drawn, axis):
            draw_curves(axis, curves, x_label, title)
            legend_below(drawn, axis, columns=1)
            figures.append(Figure(title, save(drawn, folder, f"run_curves{number}")))
    return figures
