"""The figures of an ablation: results beside published numbers, curves."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from fst.lab.ablation.results import INTERVAL, Results
from fst.lab.reporting.document import Figure
from fst.lab.reporting.figures import (
    COLOURS,
    draw_curves,
    figure,
    legend_below,
    save,
)

ROW_INCHES = 0.3


def draw(results: Results, folder: Path) -> list[Figure]:
    """Write the figures for which there is something to show."""
    if not results.measured():
        return []
    return [_dots(results, folder), draw_training(results, folder)]


def _dots(results: Results, folder: Path) -> Figure:
    grid, metric = results.grid, results.grid.metric
    names = results.measured()[::-1]
    panels = 1 + len(grid.published)
    height = 1.1 + ROW_INCHES * len(names)
    with figure(height, ncols=panels, sharey=True, squeeze=False) as (drawn, axes):
        ours = axes[0][0]
        for y, name in enumerate(names):
            summary = results.summary(name, metric)
            error = None if math.isnan(summary.interval) else summary.interval
            ours.errorbar(summary.mean, y, xerr=error, fmt="o", color=COLOURS[0], capsize=3)
            ours.plot(summary.values, [y] * len(summary.values), "|", color=COLOURS[0], alpha=0.7)
        ours.set(xlabel=metric.label, title="measured", ylim=(-0.6, len(names) - 0.4))
        ours.set_yticks(range(len(names)), [grid.settings[name].label for name in names])
        for axis, column in zip(axes[0][1:], grid.published, strict=True):
            for y, name in enumerate(names):
                value = grid.settings[name].published.get(column.name)
                if value is not None:
                    axis.plot(value, y, "D", color=COLOURS[1])
            axis.set(title=f"published, {column.name}")
        for axis in axes[0]:
            axis.xaxis.set_major_locator(MaxNLocator(4))
        file = save(drawn, folder, "summary")
    return Figure(
        title=f"{metric.label} of each setting",
        file=file,
        caption=f"Dot: mean over the seeds; bar: {INTERVAL}; ticks: the seeds. "
        + " ".join(f"{c.name}: {c.source}." for c in grid.published),
    )


def draw_training(results: Results, folder: Path) -> Figure:
    """The first metric and the training loss over the epochs, as curves.png."""
    grid, metric = results.grid, results.grid.metric
    quality, loss = {}, {}
    x_label = "epoch"
    for name in results.measured():
        logs = [run.log for run in results.of(name) if run.log is not None]
        x_label = logs[0].x_label
        label = grid.settings[name].label
        quality[label] = [
            {x: metric.scale * y for x, y in log.validation.get(metric.key, {}).items()}
            for log in logs
        ]
        loss[label] = [log.training.get("loss", {}) for log in logs]
    legend = 0.22 * math.ceil(len(quality) / 2)
    with figure(6.2 + legend, nrows=2, sharex=True) as (drawn, axes):
        draw_curves(axes[0], quality, "", metric.label)
        draw_curves(axes[1], loss, x_label, "training loss")
        legend_below(drawn, axes[0], columns=2)
        file = save(drawn, folder, "curves")
    caption = f"Mean over the seeds and range from the lowest to the highest, by {x_label}."
    return Figure(title=f"{metric.label} and training loss", file=file, caption=caption)
