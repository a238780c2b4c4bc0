"""Results of a grid: means and intervals of what its runs logged, their table and curves."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, Metric
from fst.lab.ablation.runs import RESULT
from fst.lab.document import Document, Figure, Table, markdown
from fst.lab.figures import draw_curves, figure, legend_below, save
from fst.lab.logs import RunLog, read_run

CONFIDENCE = 0.95  # of every interval
INTERVAL = f"a {CONFIDENCE:.0%} interval (Student's t over the seeds)"


@dataclass(frozen=True)
class RunResult:
    """A finished run: its log, and its result.json."""

    setting: str
    seed: int
    log: RunLog
    made: dict[str, Any]

    def final(self, metric: Metric) -> float:
        """The metric after the last validation, scaled; NaN if it was not logged."""
        curve = self.log.validation.get(metric.key)
        return metric.scale * curve[max(curve)] if curve else math.nan


@dataclass(frozen=True)
class Summary:
    """Mean over the seeds, and how far an interval reaches from it."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN without a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def interval(self) -> float:
        """Half of the mean's `CONFIDENCE` interval, by Student's t; NaN for fewer than two values.

        That of differences between pairs is the paired t interval.
        """
        count = len(self.values)
        if count < 2:
            return math.nan
        error = statistics.stdev(self.values) / math.sqrt(count)
        return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error

    def __str__(self) -> str:
        if not self.values:
            return "–"
        return f"{self.mean:.2f}" + (f" ± {self.interval:.2f}" if len(self.values) > 1 else "")


@dataclass(frozen=True)
class Results:
    """The finished runs of a grid."""

    grid: Grid
    runs: tuple[RunResult, ...]

    def of(self, setting: str) -> list[RunResult]:
        """Those of a setting."""
        return [run for run in self.runs if run.setting == setting]

    def summary(self, setting: str, metric: Metric) -> Summary:
        """A metric over the runs of a setting."""
        values = [run.final(metric) for run in self.of(setting)]
        return Summary(tuple(value for value in values if not math.isnan(value)))

    def change(self, setting: str, baseline: str, metric: Metric) -> Summary:
        """Differences from another setting, of the seeds that both have finished."""
        before = {run.seed: run.final(metric) for run in self.of(baseline)}
        found = [
            run.final(metric) - before[run.seed] for run in self.of(setting) if run.seed in before
        ]
        return Summary(tuple(value for value in found if not math.isnan(value)))

    def measured(self) -> list[str]:
        """The settings with a finished run."""
        return [name for name in self.grid.settings if self.of(name)]


def collect(
    grid: Grid, work_dir: Path, names: Sequence[str], seeds: Collection[int] | None = None
) -> Results:
    """Read the finished runs of the settings ``names``: of ``seeds``, or of every seed."""
    settings = {name: setting for name, setting in grid.settings.items() if name in names}
    baseline = grid.baseline if grid.baseline in settings else None
    runs = []
    for name in settings:
        found = {int(f.parent.name[4:]): f for f in (work_dir / name).glob(f"seed*/{RESULT}")}
        for seed, file in sorted(found.items()):
            if seeds is None or seed in seeds:
                made = json.loads(file.read_text(encoding="utf-8"))
                runs.append(RunResult(name, seed, read_run(file.parent), made))
    return Results(replace(grid, settings=settings, baseline=baseline), tuple(runs))


def write(results: Results, folder: Path, command: str) -> Document:
    """Write results.md and curves.png; ``command`` makes them."""
    grid = results.grid
    notes = [f"{s.label}: {s.note}" for s in grid.settings.values() if s.note]
    if grid.options:
        notes.append("Changed in all: " + ", ".join(f"{k}={v}" for k, v in grid.options.items()))
    document = Document(
        title=grid.title,
        description=grid.description,
        command=command,
        made_with=" and ".join(dict.fromkeys(run.made["made with"] for run in results.runs)),
        tables=[_table(results)],
        figures=[draw_training(results, folder)] if results.runs else [],
        notes=notes,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(markdown(document), folder / "results.md")
    return document


def signed(value: float) -> str:
    """With two digits and a sign; a minus as typographers write it."""
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")


def change_cell(change: Summary) -> str | None:
    """The mean of paired differences, and its interval; None without a pair."""
    if not change.values:
        return None
    count = len(change.values)
    if count == 1:
        return f"{signed(change.mean)} (one seed: no interval)"
    return f"{signed(change.mean)} ± {change.interval:.2f} (n = {count})"


def draw_training(results: Results, folder: Path) -> Figure:
    """The first metric and the training loss over the epochs, as curves.png."""
    grid, metric = results.grid, results.grid.metric
    quality, loss = {}, {}
    for name in results.measured():
        label, logs = grid.settings[name].label, [run.log for run in results.of(name)]
        curves = [log.validation.get(metric.key, {}) for log in logs]
        quality[label] = [{x: metric.scale * y for x, y in curve.items()} for curve in curves]
        loss[label] = [log.training.get("loss", {}) for log in logs]
    x_label = results.runs[0].log.x_label
    legend = 0.22 * math.ceil(len(quality) / 2)
    with figure(6.2 + legend, nrows=2, sharex=True) as (drawn, axes):
        draw_curves(axes[0], quality, "", metric.label)
        draw_curves(axes[1], loss, x_label, "training loss")
        legend_below(drawn, axes[0], columns=2)
        file = save(drawn, folder, "curves")
    caption = f"Mean over the seeds and range from the lowest to the highest, by {x_label}."
    return Figure(f"{metric.label} and training loss", file, caption)


def _table(results: Results) -> Table:
    grid, metric, baseline = results.grid, results.grid.metric, results.grid.baseline
    change = f"change from {grid.settings[baseline].label}" if baseline else ""
    columns = ["setting", metric.label, "runs", *([change] if change else [])]
    for column in grid.published:
        columns += [f"published, {column.name}"]
        columns += [f"{change}, {column.name}"] if change else []
        columns += [f"measured − {column.name}"] if column.same_data else []
    columns += [other.label for other in grid.metrics[1:]] + ["training loss", "epochs"]
    rows: list[list[object]] = []
    for name, setting in grid.settings.items():
        runs, summary = results.of(name), results.summary(name, metric)
        row: list[object] = [setting.label, summary, len(runs)]
        if baseline:
            paired = results.change(name, baseline, metric)
            row.append(None if name == baseline else change_cell(paired))
        for column in grid.published:
            value = setting.published.get(column.name)
            row.append(value)
            if baseline:
                reference = grid.settings[baseline].published.get(column.name)
                row.append(_difference(value, reference if name != baseline else None))
            if column.same_data:
                row.append(_difference(summary.mean, value))
        row += [results.summary(name, other) for other in grid.metrics[1:]]
        losses = [curve[max(curve)] for run in runs if (curve := run.log.training.get("loss"))]
        row.append(f"{statistics.fmean(losses):.3f}" if losses else None)
        rows.append([*row, runs[0].made["epochs"] if runs else None])
    seeds = sorted({run.seed for run in results.runs})
    caption = (
        f"{metric.label}: after the last epoch, mean over the seeds {', '.join(map(str, seeds))}. "
        + (f"{change}: mean of the differences of equal seeds, n of them. " if change else "")
        + f"±: half of {INTERVAL}; a single seed has none. "
        + "Epochs a + b: b, after the a of the run whose weights they start from. "
        + " ".join(f"{column.name}: {column.source}." for column in grid.published)
    )
    return Table("Results", columns, rows, caption.strip())


def _difference(value: float | None, reference: float | None) -> str | None:
    if value is None or reference is None or math.isnan(value):
        return None
    return signed(value - reference)
