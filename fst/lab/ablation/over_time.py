"""Trainings of equal time: the metric over the seconds, and when the baseline's end is reached."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from fst.lab.ablation.configs import VALIDATIONS
from fst.lab.ablation.equal_time import ROUNDS, EqualTime
from fst.lab.ablation.results import INTERVAL, Results, RunResult
from fst.lab.reporting.document import Cell, Figure, Table
from fst.lab.reporting.figures import INK, draw_curves, figure, legend_below, save


def over_time(results: Results, times: EqualTime, folder: Path) -> tuple[Table, Figure]:
    """The table, and the figure over_time.png in ``folder``."""
    baseline = results.summary(times.baseline, results.grid.metric)
    return _table(results, times, baseline.mean), _figure(results, times, baseline.mean, folder)


def _curve(results: Results, run: RunResult, times: EqualTime) -> dict[float, float]:
    """Seconds of training -> metric."""
    metric, seconds = results.grid.metric, times.seconds(run.setting)
    logged = {} if run.log is None else run.log.validation.get(metric.key, {})
    return {epoch * seconds: metric.scale * value for epoch, value in logged.items()}


def _seconds_to(results: Results, run: RunResult, times: EqualTime, target: float) -> float | None:
    """When a run's validation first reached ``target``; None if it never did."""
    sign = 1 if results.grid.metric.better == "higher" else -1
    curve = _curve(results, run, times).items()
    return next((seconds for seconds, value in curve if sign * (value - target) >= 0), None)


def _table(results: Results, times: EqualTime, target: float) -> Table:
    grid, metric = results.grid, results.grid.metric
    label = grid.settings[times.baseline].label
    columns = ["setting", "step, ms", "epochs", "seconds", metric.label, "runs"]
    columns.append(f"seconds to {label}'s {target:.2f}")
    rows: list[list[Cell]] = []
    for name in results.measured():
        runs = results.of(name)
        reached = [_seconds_to(results, run, times, target) for run in runs]
        found = [seconds for seconds in reached if seconds is not None]
        text = "not reached"
        if found:
            text = f"{statistics.fmean(found):.0f} ({len(found)} of {len(runs)} runs)"
        epochs = grid.lengths[name]
        seconds = f"{epochs * times.seconds(name):.0f}"
        summary = str(results.summary(name, metric))
        step = str(times.steps[name])
        rows.append([grid.settings[name].label, step, epochs, seconds, summary, len(runs), text])
    caption = (
        f"Every setting had the {_budget(results, times):.0f} s of {label}'s training, to the "
        "nearest whole epoch, its schedule stretched to them. Seconds are steps times the step's "
        f"time: the median (and quartiles) of up to {ROUNDS} rounds in which all settings take "
        "turns, loading, augmentation and optimizer included, on "
        f"{times.machine['device']}, {times.machine['threads']} threads, autotuner "
        f"{times.machine['autotuner']}; validation is not counted. The last column: the first of "
        f"about {VALIDATIONS} validations that reaches the mean of {label}'s ends, mean over the "
        f"runs that reach it. ±: half of {INTERVAL}; a single seed has none."
    )
    return Table("At equal time", columns, rows, caption)


def _budget(results: Results, times: EqualTime) -> float:
    return results.grid.lengths[times.baseline] * times.seconds(times.baseline)


def _figure(results: Results, times: EqualTime, target: float, folder: Path) -> Figure:
    grid, metric = results.grid, results.grid.metric
    curves = {
        grid.settings[name].label: [_curve(results, run, times) for run in results.of(name)]
        for name in results.measured()
    }
    with figure(3.6 + 0.22 * math.ceil(len(curves) / 2)) as (drawn, axis):
        draw_curves(axis, curves, "seconds of training", metric.label)
        if not math.isnan(target):
            axis.axhline(target, color=INK, linewidth=0.8, linestyle=":")
        legend_below(drawn, axis, columns=2)
        file = save(drawn, folder, "over_time")
    caption = (
        "Mean over the seeds and range from the lowest to the highest, over steps times the "
        f"measured time of a step ({times.machine['device']}). Dotted: where "
        f"{grid.settings[times.baseline].label} ends."
    )
    return Figure(title=f"{metric.label} at equal time", file=file, caption=caption)
