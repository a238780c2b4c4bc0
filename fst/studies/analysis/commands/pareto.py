"""Accuracy of a grid's settings against what their weight gradients cost."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
from matplotlib.figure import Figure

import fst
from fst.backends import timing
from fst.basics.arguments import positive, usable_device
from fst.engine.model import sparse_root, within_root
from fst.gradients import Gradients, recorded
from fst.rules.rule import Rule, phases_of
from fst.studies.ablation.folders import RunFolder
from fst.studies.ablation.grid import load_grid
from fst.studies.ablation.invocation import changed, read_invocation
from fst.studies.ablation.results import Results, collect
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.subject import from_config_on_random_images
from fst.studies.reporting.figures import COLOURS, INK, figure, legend_below

EXACT = "exact"
COSTS = ("multiply-adds", "time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument(
        "grid", type=Path, help="grid whose runs are finished: a file, or fst::configs/ablation/..."
    )
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
    parser.add_argument("--device", type=usable_device, default="cpu", help="(default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the images (default: 0)")


def run(options: argparse.Namespace) -> Result:
    """Time all weight gradients of one step under the rules of each setting."""
    if options.threads:
        torch.set_num_threads(options.threads)
    grid = load_grid(options.grid)
    work_dir = options.work_dir or Path("work_dirs/ablation") / grid.path.stem
    grid = changed(grid, read_invocation(work_dir))
    results = collect(grid, work_dir, grid.select(options.only))
    names = results.measured()
    if not names:
        raise ValueError(f"{str(work_dir)!r} has no finished run of this grid.")
    gradients: dict[str, Gradients] = {}
    sparse: set[str] = set()  # settings with pruned weights
    rules: dict[str, dict[str, Rule | None]] = {EXACT: {}}
    for name in names:
        made = RunFolder.of(work_dir, name, results.of(name)[0].seed).config
        subject = from_config_on_random_images(
            str(made),
            None,
            batch_size=options.batch_size,
            size=options.size,
            device=options.device,
            seed=options.seed,
        )
        root = sparse_root(subject.model)
        if not gradients:
            exact = recorded(subject.copied(), subject.batches[0], subject.loss)
            gradients = within_root(subject.model, exact)
        fst.convert(root, subject.strategy or "dense", plan=subject.plan, **subject.selectors)
        layers = fst.sparse_layers(root)
        rules[name] = {n: layer.strategy.grad_weight for n, layer in layers.items()}
        if any(layer.strategy.output is not None for layer in layers.values()):
            sparse.add(name)
        others = sorted(layers.keys() - gradients.keys())
        if others:
            raise ValueError(
                f"setting {name!r}: {others[0]!r} is no convolution with a gradient in {names[0]!r}"
                ", and only those are measured."
            )
    functions = {
        name: functools.partial(_step, gradients, chosen) for name, chosen in rules.items()
    }
    times = timing.compare(functions, options.repeats, options.device)
    whole = sum(found.multiply_adds for found in gradients.values())
    costs = {}
    for name in names:
        left = sum(g.cost(rules[name].get(n)) for n, g in gradients.items())
        costs[name] = (left / whole, times[name].median / times[EXACT].median)
    return _result(results, costs, sparse, options)


def _step(gradients: dict[str, Gradients], rules: dict[str, Rule | None]) -> None:
    for name, found in gradients.items():
        found.of(rules.get(name), phases_of(rules.get(name))[0])


def _result(
    results: Results,
    costs: dict[str, tuple[float, float]],
    sparse: set[str],
    options: argparse.Namespace,
) -> Result:
    grid, metric = results.grid, results.grid.metric
    result = Result(
        f"{grid.title}: accuracy against the cost of the weight gradients",
        f"Batch {options.batch_size}, {torch.get_num_threads()} threads, medians of "
        f"{options.repeats} rounds in turns; the first draw of random rules. Times are those of "
        "all weight gradients of a step, relative to the library's exact ones.",
    )
    rows = []
    for name, (share, time) in costs.items():
        summary = results.summary(name, metric)
        rows.append([grid.settings[name].label, len(summary.values), str(summary), share, time])
    header = ["setting", "seeds", metric.label, *COSTS]
    result.add_table("Accuracy and cost", header, rows)
    caption = (
        "Circles: dense weights; squares: pruned weights; bars: standard deviation over the seeds; "
        "line: what no cheaper setting reaches."
    )
    result.plots.append(
        Plot("Accuracy and cost", "pareto", caption, _drawn(results, costs, sparse))
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
                axis.errorbar(x, summary.mean, summary.std, elinewidth=0.8, label=named, **style)
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
