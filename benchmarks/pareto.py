"""Accuracy of a grid's settings against what their weight gradients cost: a table and a figure.

python benchmarks/pareto.py configs/ablation/cifar10_weight_gradient.yaml --threads 2

Costs are the multiply-adds and the time of all weight gradients of a training step. Of the grid,
finished runs count.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from fst import get_strategy
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.cli.options.analyze import add_output
from fst.lab.ablation.folders import RunFolder
from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.invocation import changed, read_invocation
from fst.lab.ablation.results import INTERVAL, Results, collect
from fst.lab.analysis.commands.macs import count_step
from fst.lab.benchmark import PLAIN, layer_shapes, time_layer
from fst.lab.model import Training, from_config
from fst.lab.reporting.document import Document
from fst.lab.reporting.figures import COLOURS, INK, SMALL, figure, legend_below, style
from fst.lab.reporting.markdown import publish
from fst.rules.strategy import Strategy

COSTS = ("multiply-adds", "time")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path, help="grid file, or fst::configs/ablation/...")
    parser.add_argument(
        "--work-dir", type=Path, help="of the grid (default: work_dirs/ablation/<grid name>)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SETTING", help="only these settings (default: all that ran)"
    )
    parser.add_argument("--batch-size", type=positive, default=128, help="(default: 128)")
    parser.add_argument("--size", type=positive, default=32, help="of the images (default: 32)")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (default: 15)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    add_output(parser, "pareto")
    add_traceback(parser)
    options = parser.parse_args(argv)
    with user_errors(options), style(SMALL):
        command = shlex.join(["python", *sys.argv]) if argv is None else shlex.join(argv)
        written = publish(run(options), options.out, command)
    print("\n".join(f"written: {path}" for path in written))
    return 0


def run(options: argparse.Namespace) -> Document:
    """Count and time all weight gradients of one step under the rules of each setting."""
    if options.threads:
        torch.set_num_threads(options.threads)
    grid = load_grid(options.grid)
    work_dir = options.work_dir or Path("work_dirs/ablation") / grid.path.stem
    grid = changed(grid, read_invocation(work_dir))
    results = collect(grid, work_dir, grid.select(options.only))
    names = results.measured()
    if not names:
        raise ValueError(f"{str(work_dir)!r} has no finished run of this grid.")
    settings = {name: _setting(results, name, work_dir, options) for name in names}
    times = _times(settings, options)
    costs = {
        name: (setting.share_left, times[name] / times[PLAIN]) for name, setting in settings.items()
    }
    sparse = {name for name, s in settings.items() if s.converted and s.strategy.output}
    return _result(results, costs, sparse, options)


class Setting(NamedTuple):
    """The training of a setting: its strategy, its sparse layers, and the share of the weight
    gradients' multiply-adds that it leaves.
    """

    training: Training
    strategy: Strategy
    converted: set[str]
    share_left: float


def _setting(results: Results, name: str, work_dir: Path, options: argparse.Namespace) -> Setting:
    made = RunFolder.of(work_dir, name, results.of(name)[0].seed).config
    training = from_config(str(made), options.batch_size, (options.size, options.size))
    strategy = training.strategy or get_strategy("dense")
    converted = training.converted(strategy)
    counted = count_step(training, strategy)
    kind = {"all": None}.get(layers := _layers_of(training), layers)
    share = counted.total("grad_weight", kind=kind).share_left
    return Setting(training, strategy, converted, share)


def _layers_of(training: Training) -> str:
    """Which layers a setting converts: "conv", "linear" or "all"."""
    return training.selection.get("layers") or "conv"


def _times(settings: Mapping[str, Setting], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of all weight gradients of a step, by setting and for plain PyTorch."""
    training = next(iter(settings.values())).training
    run = functools.partial(training.loss, training.model)
    shapes = layer_shapes(training.model, run, _layers_of(training))
    spent = dict.fromkeys((PLAIN, *settings), 0.0)
    for shape, layers in shapes.items():
        sparse = {n: s.strategy for n, s in settings.items() if s.converted.intersection(layers)}
        times = time_layer(
            shape,
            len(layers),
            sparse,
            device=training.device,
            dtype=torch.float32,
            memory_format=torch.channels_last,
            repeats=options.repeats,
            parts=["grad_weight"],
        ).times["grad_weight"]
        for name in spent:
            spent[name] += len(layers) * times.get(name, times[PLAIN]).median
    return spent


def _result(
    results: Results,
    costs: dict[str, tuple[float, float]],
    sparse: set[str],
    options: argparse.Namespace,
) -> Document:
    grid, metric = results.grid, results.grid.metric
    result = Document(
        f"{grid.title}: accuracy against the cost of the weight gradients",
        f"Batch {options.batch_size}, {torch.get_num_threads()} threads, medians of "
        f"{options.repeats} rounds in turns. Costs are those of "
        f"all weight gradients of a step, relative to plain PyTorch's. ±: half of {INTERVAL}.",
    )
    rows = []
    for name, (share, time) in costs.items():
        summary = results.summary(name, metric)
        rows.append([grid.settings[name].label, len(summary.values), str(summary), share, time])
    header = ["setting", "seeds", metric.label, *COSTS]
    result.add_table("Accuracy and cost", header, rows)
    caption = (
        f"Circles: dense weights; squares: pruned weights; bars: {INTERVAL}; line: what no cheaper "
        "setting reaches."
    )
    result.add_figure(
        "Accuracy and cost", "pareto", caption, _drawn(results, costs, sparse), options.out
    )
    return result


def _drawn(results: Results, costs: dict[str, tuple[float, float]], sparse: set[str]) -> Figure:
    """A panel for each cost; settings are numbered, and named below."""
    grid, metric = results.grid, results.grid.metric
    summaries = {name: results.summary(name, metric) for name in costs}
    with figure(4 + 0.1 * len(costs), ncols=2, sharey=True) as (drawn, axes):
        for axis, index, label in zip(axes, (0, 1), COSTS, strict=True):
            for number, (name, summary) in enumerate(summaries.items(), 1):
                x = costs[name][index]
                kind = name in sparse
                style = {"fmt": "os"[kind], "color": COLOURS[kind], "markersize": 4}
                named = f"{number}  {grid.settings[name].label}"
                axis.errorbar(
                    x, summary.mean, summary.interval, elinewidth=0.8, label=named, **style
                )
                axis.annotate(
                    str(number), (x, summary.mean), (3, 2), textcoords="offset points", size=7
                )
            best = front([(costs[name][index], found.mean) for name, found in summaries.items()])
            axis.plot(*zip(*best, strict=True), color=INK, linewidth=0.6, linestyle=":")
            axis.set(xlabel=f"{label}, dense = 1")
        axes[0].set_ylabel(metric.label)
        legend_below(drawn, axes[0], columns=2)
    return drawn


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, accuracy) that are more accurate than all cheaper ones."""
    best: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((cost, accuracy))
    return best


if __name__ == "__main__":
    sys.exit(main())
