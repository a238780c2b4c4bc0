"""Learning rates on validation splits: a table of each grid, and one figure.

    python benchmarks/choices.py work_dirs/cifar10_equal_time_choices_{0.1,0.2,0.4} ...

Folders whose names differ in the rate behind the last "_" are one table; each holds the trainings
and the grid of benchmarks/equal_time.py. Finished runs count, of the seeds that a setting has at
every rate. A higher metric is better.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.results import Results, collect, signed
from fst.lab.document import Document, Figure, make_page
from fst.lab.figures import figure, legend_below, save

GRID = "equal_time.yaml"
PANEL_INCHES = 2.2


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="NAME_RATE", help="of trainings")
    return make_page(parser, lambda options: run(options.folders, options.out), argv)


def run(folders: Sequence[Path], out: Path) -> Document:
    """Read every folder's runs."""
    found: dict[str, dict[float, Results]] = {}
    for folder in folders:
        name, rate = _name_and_rate(folder)
        found.setdefault(name, {})[rate] = _results(folder)
    made = Document(
        "Learning rates",
        "Metric on the validation split after the last epoch, mean over the seeds.",
    )
    for of_rates in found.values():
        grid = next(iter(of_rates.values())).grid
        made.add_table(grid.title, *_table(dict(sorted(of_rates.items()))))
    made.figures.append(_draw(list(found.values()), out))
    return made


def _name_and_rate(folder: Path) -> tuple[str, float]:
    name, _, rate = folder.name.rpartition("_")
    try:
        return name, float(rate)
    except ValueError:
        raise ValueError(f"{str(folder)!r} must end in _RATE, such as _0.1.") from None


def _results(folder: Path) -> Results:
    grid = load_grid(folder / GRID)
    return collect(grid, folder, list(grid.settings))


def _ends(of_rates: Mapping[float, Results], setting: str) -> dict[float, dict[int, float]]:
    """Rate -> seed -> the metric at the end, of the seeds at every rate; empty without one."""
    ends = {
        rate: {run.seed: run.final(results.grid.metric) for run in results.of(setting)}
        for rate, results in of_rates.items()
    }
    seeds = sorted(set.intersection(*(set(values) for values in ends.values())))
    return {rate: {s: values[s] for s in seeds} for rate, values in ends.items()} if seeds else {}


def _means(ends: Mapping[float, Mapping[int, float]]) -> dict[float, float]:
    return {rate: statistics.fmean(values.values()) for rate, values in ends.items()}


def _at_best(ends: Mapping[float, Mapping[int, float]]) -> tuple[float, Mapping[int, float]]:
    """The rate with the best mean, and its ends."""
    means = _means(ends)
    best = max(means, key=lambda rate: means[rate])
    return best, ends[best]


def _table(of_rates: Mapping[float, Results]) -> tuple[list[str], list[list[str]]]:
    grid = next(iter(of_rates.values())).grid
    found = {name: ends for name in grid.settings if (ends := _ends(of_rates, name))}
    if grid.baseline not in found:
        raise ValueError(f"{grid.title!r} has no run of {grid.baseline!r} at every rate.")
    _, dense = _at_best(found[grid.baseline])
    rows = []
    for name, ends in found.items():
        best, values = _at_best(ends)
        means = {rate: f"{mean:.2f}" for rate, mean in _means(ends).items()}
        cells = [f"**{mean}**" if rate == best else mean for rate, mean in means.items()]
        both = [values[seed] - dense[seed] for seed in values if seed in dense]
        change = "" if name == grid.baseline or not both else signed(statistics.fmean(both))
        rows.append([grid.settings[name].label, *cells, change, str(len(values))])
    label = grid.settings[grid.baseline].label
    rates = [f"{rate:g}" for rate in of_rates]
    return ["setting", *rates, f"change from {label}, each at its best", "seeds"], rows


def _draw(found: Sequence[Mapping[float, Results]], folder: Path) -> Figure:
    """A panel for each grid: the end of each setting over the rate."""
    with figure(0.8 + PANEL_INCHES * len(found), nrows=len(found), squeeze=False) as drawn:
        canvas, axes = drawn
        for axis, of_rates in zip(axes[:, 0], found, strict=True):
            grid = next(iter(of_rates.values())).grid
            for name, setting in grid.settings.items():
                means = dict(sorted(_means(_ends(of_rates, name)).items()))
                axis.plot(list(means), list(means.values()), marker=".", label=setting.label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(of_rates), [f"{rate:g}" for rate in sorted(of_rates)])
            axis.set(title=grid.title, xlabel="learning rate", ylabel=grid.metric.label)
        legend_below(canvas, axes[-1, 0], columns=4)
        file = save(canvas, folder, "choices")
    return Figure("Choices", file, "Mean over the seeds.")


if __name__ == "__main__":
    sys.exit(main())
