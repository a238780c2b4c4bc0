"""Learning rates on validation splits: a table of each grid, and one figure.

    python benchmarks/choices.py work_dirs/cifar10_equal_time_choices_{0.1,0.2,0.4} ...

Folders whose names differ in the rate behind the last "_" are one table; each holds the trainings
and the grid of benchmarks/equal_time.py. Finished runs count, of the seeds that a setting has at
every rate.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fst.basics.arguments import add_traceback, user_errors
from fst.cli.options.analyze import add_output
from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.results import Results, Summary, collect
from fst.lab.reporting.document import Document, Figure
from fst.lab.reporting.figures import figure, legend_below, save
from fst.lab.reporting.markdown import publish

GRID = "equal_time.yaml"
PANEL_INCHES = 2.2


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, write, print where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="NAME_RATE", help="of trainings")
    add_output(parser, "choices")
    add_traceback(parser)
    options = parser.parse_args(argv)
    with user_errors(options):
        command = shlex.join(["python", *(sys.argv if argv is None else argv)])
        written = publish(run(options.folders, options.out), options.out, command)
    print("\n".join(f"written: {path}" for path in written))
    return 0


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


def _ends(of_rates: Mapping[float, Results], setting: str) -> dict[float, Summary]:
    """Rate -> the metric at the end of the seeds that every rate has; empty if there is none."""
    ends = {
        rate: {run.seed: run.final(results.grid.metric) for run in results.of(setting)}
        for rate, results in of_rates.items()
    }
    seeds = sorted(set.intersection(*(set(values) for values in ends.values())))
    if not seeds:
        return {}
    return {rate: Summary(tuple(values[s] for s in seeds)) for rate, values in ends.items()}


def _table(of_rates: Mapping[float, Results]) -> tuple[list[str], list[list[str]]]:
    grid = next(iter(of_rates.values())).grid
    rows = []
    for name, setting in grid.settings.items():
        ends = _ends(of_rates, name)
        if ends:
            best = max(ends, key=lambda rate: ends[rate].mean)
            cells = [f"**{e.mean:.2f}**" if r == best else f"{e.mean:.2f}" for r, e in ends.items()]
            rows.append([setting.label, *cells, str(len(ends[best].values))])
    return ["setting", *(f"{rate:g}" for rate in of_rates), "seeds"], rows


def _draw(found: Sequence[Mapping[float, Results]], folder: Path) -> Figure:
    """A panel for each grid: the end of each setting over the rate."""
    with figure(0.8 + PANEL_INCHES * len(found), nrows=len(found), squeeze=False) as drawn:
        canvas, axes = drawn
        for axis, of_rates in zip(axes[:, 0], found, strict=True):
            grid = next(iter(of_rates.values())).grid
            for name, setting in grid.settings.items():
                ends = dict(sorted(_ends(of_rates, name).items()))
                means = [summary.mean for summary in ends.values()]
                axis.plot(list(ends), means, marker=".", label=setting.label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(of_rates), [f"{rate:g}" for rate in sorted(of_rates)])
            axis.set(title=grid.title, xlabel="learning rate", ylabel=grid.metric.label)
        legend_below(canvas, axes[-1, 0], columns=4)
        file = save(canvas, folder, "choices")
    return Figure("Choices", file, "Mean over the seeds.")


if __name__ == "__main__":
    sys.exit(main())
