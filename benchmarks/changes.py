"""Changes by strategy in several grids: a table of each grid, and one figure.

    python benchmarks/changes.py configs/ablation/bccd_weight_gradient.yaml=WORK_DIR ...

Changes are differences from the grid's baseline, paired by seed. With `--second fst_w` the settings
behind `fst_w` in the grid are compared with it too. Finished runs count.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from fst.basics.text import suggest
from fst.lab.ablation.grid import Grid, load_grid
from fst.lab.ablation.results import INTERVAL, Results, Summary, collect, signed
from fst.lab.document import Document, Figure, make_page
from fst.lab.figures import COLOURS, INK, figure, save

ROW_INCHES = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grids", nargs="+", metavar="GRID=WORK_DIR", help="grid file, and its runs")
    parser.add_argument(
        "--only", nargs="+", metavar="SETTING", help="only these settings (default: all that ran)"
    )
    parser.add_argument(
        "--second", metavar="SETTING", help="another baseline, of the settings behind it"
    )
    return make_page(parser, run, argv)


def run(options: argparse.Namespace) -> Document:
    """Read every grid's runs."""
    grids = [_grid(argument) for argument in options.grids]
    known = {name for grid, _ in grids for name in grid.settings}
    for name in (*(options.only or ()), *([options.second] if options.second else ())):
        if name not in known:
            raise ValueError(f"{name!r} is no setting of these grids.{suggest(name, known)}")
    read = [_results(grid, folder, options.only) for grid, folder in grids]
    made = Document(
        "Changes by strategy",
        "Metric after the last epoch, mean over the seeds; changes are paired by seed. "
        f"±: half of {INTERVAL}.",
    )
    for results in read:
        made.add_table(results.grid.title, *_table(results, options.second))
    made.figures.append(_draw(read, options.out))
    return made


def _grid(argument: str) -> tuple[Grid, Path]:
    """A grid, and the folder of its runs."""
    path, equals, folder = argument.partition("=")
    if not equals:
        raise ValueError(f"{argument!r} must be GRID=WORK_DIR.")
    return load_grid(path), Path(folder)


def _results(grid: Grid, folder: Path, only: Sequence[str] | None) -> Results:
    """The finished runs of the settings ``only`` (None: of all), and those of the baseline."""
    names = [n for n in grid.settings if only is None or n in only or n == grid.baseline]
    results = collect(grid, folder, names)
    if grid.baseline not in results.measured():
        raise ValueError(f"{str(folder)!r} has no finished run of the baseline {grid.baseline!r}.")
    return results


def _table(results: Results, second: str | None) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a grid."""
    grid, names, metric = results.grid, results.measured(), results.grid.metric
    first = str(grid.baseline)
    heads = ["setting", metric.label, "seeds", f"change from {first}"]
    heads += [f"change from {second}"] if second else []
    behind = names[names.index(second) + 1 :] if second in names else []
    rows = []
    for name in names:
        seeds = " / ".join(f"{run.final(metric):.2f}" for run in results.of(name))
        row = [grid.settings[name].label, str(results.summary(name, metric)), seeds]
        row.append("" if name == first else _words(results.change(name, first, metric)))
        if second:
            row.append(_words(results.change(name, second, metric)) if name in behind else "")
        rows.append(row)
    return heads, rows


def _words(change: Summary) -> str:
    if not change.values:
        return ""
    spread = "" if math.isnan(change.interval) else f" ± {change.interval:.2f}"
    return signed(change.mean) + spread


def _draw(read: Sequence[Results], folder: Path) -> Figure:
    """A panel for each grid: the change of each setting, with its interval."""
    sizes = [len(results.measured()) for results in read]
    with figure(0.7 * len(read) + ROW_INCHES * sum(sizes), nrows=len(read), squeeze=False) as drawn:
        canvas, axes = drawn
        for axis, results in zip(axes[:, 0], read, strict=True):
            _draw_changes(axis, results)
        file = save(canvas, folder, "changes")
    caption = f"Mean change from the baseline; bar: {INTERVAL}; ticks: the seeds."
    return Figure("Changes", file, caption)


def _draw_changes(axis: Axes, results: Results) -> None:
    grid = results.grid
    first, metric = str(grid.baseline), grid.metric
    names = [name for name in results.measured() if name != first][::-1]
    for y, name in enumerate(names):
        change = results.change(name, first, metric)
        error = None if math.isnan(change.interval) else change.interval
        axis.errorbar(change.mean, y, xerr=error, fmt="o", color=COLOURS[0], capsize=2)
        axis.plot(change.values, [y] * len(change.values), "|", color=COLOURS[0], alpha=0.7)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_yticks(range(len(names)), [grid.settings[name].label for name in names], fontsize=8)
    axis.set_title(f"{grid.title}, {metric.label}", fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
