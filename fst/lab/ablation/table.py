"""Writing of what an ablation found: results.md and .json, curves.csv, figures, analysis.json."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fst.cli.environment import machine, versions
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.plots import draw
from fst.lab.ablation.results import INTERVAL, Results, Summary
from fst.lab.reporting.document import Cell, Document, Table
from fst.lab.reporting.markdown import markdown


def write(results: Results, folder: Path, command: str) -> Document:
    """Write everything into ``folder``; ``command`` is how to get it."""
    document = Document(
        title=results.grid.title,
        description=results.grid.description,
        command=command,
        versions={"machine": machine(), **_versions(results)},
        tables=[_main(results)],
        figures=draw(results, folder),
        notes=_notes(results),
    )
    document.save(folder)
    write_text_atomically(markdown(document), folder / "results.md")
    write_text_atomically(_json(results, document), folder / "results.json")
    _write_curves(results, folder / "curves.csv")
    return document


def signed(value: float) -> str:
    """With two digits and a sign; a minus as typographers write it."""
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")


def _main(results: Results) -> Table:
    grid, metric, baseline = results.grid, results.grid.metric, results.grid.baseline
    change = f"change from {grid.settings[baseline].label}" if baseline else None
    columns = ["setting", metric.label, "runs", *([change] if change else [])]
    for column in grid.published:
        columns += [f"published, {column.name}"]
        columns += [f"{change}, {column.name}"] if change else []
        columns += [f"measured − {column.name}"] if column.same_data else []
    columns += [other.label for other in grid.metrics[1:]] + ["training loss", "epochs"]
    rows: list[list[Cell]] = []
    for name, setting in grid.settings.items():
        summary = results.summary(name, metric)
        row: list[Cell] = [setting.label, str(summary), len(results.of(name))]
        if baseline:
            paired = results.change(name, baseline, metric)
            row.append(None if name == baseline else change_cell(paired))
        for column in grid.published:
            value = setting.published.get(column.name, math.nan)
            row.append(None if math.isnan(value) else str(value))
            if change:
                reference = grid.settings[baseline or name].published.get(column.name, math.nan)
                row.append(_difference(value, reference, name != baseline))
            if column.same_data:
                row.append(_difference(summary.mean, value))
        row += [str(results.summary(name, other)) for other in grid.metrics[1:]]
        rows.append([*row, _loss(results, name), _epochs(results, name)])
    seeds = sorted({run.seed for run in results.runs if run.state == "finished"})
    caption = (
        f"{metric.label}: after the last epoch, mean over the seeds {', '.join(map(str, seeds))}. "
        + (f"{change}: mean of the differences of equal seeds, n of them. " if change else "")
        + f"±: half of {INTERVAL}; a single seed has none. "
        + " ".join(f"{column.name}: {column.source}." for column in grid.published)
    )
    return Table("Results", columns, rows, caption.strip())


def change_cell(change: Summary) -> str | None:
    """The mean of paired differences, and its interval; None without a pair."""
    if not change.values:
        return None
    count = len(change.values)
    if count == 1:
        return f"{signed(change.mean)} (one seed: no interval)"
    return f"{signed(change.mean)} ± {change.interval:.2f} (n = {count})"


def _difference(value: float, reference: float, shown: bool = True) -> str | None:
    difference = value - reference
    return None if math.isnan(difference) or not shown else signed(difference)


def _loss(results: Results, name: str) -> str | None:
    curves = [run.log.training.get("loss") for run in results.of(name) if run.log is not None]
    last = [curve[max(curve)] for curve in curves if curve]
    return f"{sum(last) / len(last):.3f}" if last else None


def _epochs(results: Results, name: str) -> str | None:
    """Length of the training, after that of the run it started from."""
    made = next((run.made for run in results.of(name)), None)
    if made is None:
        return None
    return f"{made['earlier']} + {made['length']}" if made["earlier"] else str(made["length"])


def _notes(results: Results) -> list[str]:
    grid = results.grid
    notes = [f"{s.label}: {s.note}" for s in grid.settings.values() if s.note]
    for run in results.runs:
        if run.state == "failed":
            reason = (run.reason.strip().splitlines() or ["unknown"])[-1]
            notes.append(f"{grid.settings[run.setting].label}, seed {run.seed} failed: {reason}")
        elif run.state == "unfinished":
            notes.append(f"{grid.settings[run.setting].label}, seed {run.seed} is not finished.")
        elif run.state == "changed":
            notes.append(
                f"{grid.settings[run.setting].label}, seed {run.seed}: trained with another "
                f"config, left out ({run.reason})."
            )
    for name, setting in grid.settings.items():
        if setting.start_from is not None and results.of(name):
            source = grid.settings[setting.start_from].label
            notes.append(
                f"{setting.label} starts from the trained {source} of the same seed, whose epochs "
                "come on top of its own."
            )
    if grid.epochs is not None and all(s.epochs is None for s in grid.settings.values()):
        notes.append(f"All trainings were set to {grid.epochs} epochs.")
    if grid.options:
        notes.append("Changed in all: " + ", ".join(f"{k}={v}" for k, v in grid.options.items()))
    return notes


def _versions(results: Results) -> Mapping[str, str]:
    """The versions of the runs; where they disagree, every one that occurs."""
    found: dict[str, list[str]] = {}
    for run in results.runs:
        for package, version in run.made.get("versions", {}).items():
            if version not in found.setdefault(package, []):
                found[package].append(version)
    return {package: " and ".join(v) for package, v in found.items()} or versions()


def _json(results: Results, document: Document) -> str:
    grid = results.grid

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    def described(summary: Summary) -> dict[str, float | None]:
        found = {"mean": summary.mean, "std": summary.std, "interval": summary.interval}
        return {**{key: number(value) for key, value in found.items()}, "n": len(summary.values)}

    settings: dict[str, Any] = {}
    for name, setting in grid.settings.items():
        settings[name] = {
            "label": setting.label,
            "sparsity": setting.sparsity,
            "options": setting.options,
            "start_from": setting.start_from,
            "published": setting.published,
            "metrics": {m.key: described(results.summary(name, m)) for m in grid.metrics},
            "changes": {
                m.key: described(results.change(name, grid.baseline, m))
                for m in grid.metrics
                if grid.baseline not in (None, name)
            },
            "runs": {
                str(run.seed): {
                    "state": run.state,
                    **{metric.key: number(run.final(metric)) for metric in grid.metrics},
                    "seconds": run.made.get("seconds") if run.made.get("attempts") == 1 else None,
                    "fingerprint": run.made.get("fingerprint"),
                    "commit": run.made.get("versions", {}).get("commit"),
                }
                for run in results.runs
                if run.setting == name
            },
        }
    content = {
        "title": grid.title,
        "command": document.command,
        "versions": document.versions,
        "baseline": grid.baseline,
        "interval": INTERVAL,
        "epochs": grid.epochs,
        "options": grid.options,
        "published": {c.name: c.source for c in grid.published},
        "settings": settings,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"


def _write_curves(results: Results, path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "seed", "scalar", "x", "value"])
        for run in results.runs:
            curves = {} if run.log is None else {**run.log.training, **run.log.validation}
            keys = ["loss", *(metric.key for metric in results.grid.metrics)]
            for key in keys:
                for x, value in curves.get(key, {}).items():
                    writer.writerow([run.setting, run.seed, key, x, f"{value:.6g}"])
