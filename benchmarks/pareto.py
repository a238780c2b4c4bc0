"""Accuracy of a grid's settings against what they cost: a table and a figure.

    python benchmarks/pareto.py configs/ablation/cifar10_frontier.yaml --threads 1

Costs are the times of a training step (as benchmarks/equal_time.py measures it) and of the packed
network, and its multiply-adds. Those times are taken once and lie in the work dir, so the grid may
be trained beside other work: measure on a quiet machine, first with --measure-only. Of the grid,
finished runs count.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from equal_time import TIMES, Times, timed
from matplotlib.figure import Figure

from fst import convert, fold, get_strategy, pack
from fst.backends.timing import Function, Timing, compare
from fst.basics.arguments import positive
from fst.cli.environment import surroundings
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, load_grid
from fst.lab.ablation.results import INTERVAL, Results, Summary, change_cell, collect
from fst.lab.ablation.runs import PlannedRun, as_trained, make_runs
from fst.lab.document import Document, make_page
from fst.lab.figures import COLOURS, INK, SMALL, figure, legend_below, style
from fst.layers.coverage import gemm_weights, multiply_adds
from fst.training.engine.config import read_sparsity
from fst.training.engine.export import deployable
from fst.training.engine.model import build_model, sparse_root

PACKED = "packed.json"
LABELS = ("time of a training step", "time of the packed network")
CPU = torch.device("cpu")  # on which networks are packed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
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
    parser.add_argument("--measure-only", action="store_true", help="take the times, no more")
    parser.add_argument("--batch-size", type=positive, default=128, help="(default: 128)")
    parser.add_argument("--size", type=positive, default=32, help="of the images (default: 32)")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (default: 15)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    return make_page(parser, run, argv)


def run(options: argparse.Namespace) -> Document | None:
    """Read the grid's finished runs, and measure what their settings cost."""
    if options.measure_only:
        network_times(options)
        return None
    grid, work_dir = _grid(options)
    results = collect(grid, work_dir, grid.select(options.only))
    names = results.measured()
    if grid.baseline not in names:
        raise ValueError(
            f"{str(work_dir)!r} has finished runs of {names}, not of {grid.baseline!r}."
        )
    with style(SMALL):
        return _page(results, *network_times(options), options.out)


def _grid(options: argparse.Namespace) -> tuple[Grid, Path]:
    """The grid and its work dir."""
    if options.threads:
        torch.set_num_threads(options.threads)
    grid = load_grid(options.grid)
    work_dir = options.work_dir or Path("work_dirs/ablation") / grid.path.stem
    return grid, work_dir


class Packed(NamedTuple):
    """The packed networks of all settings.

    Attributes:
        times: setting -> milliseconds of a batch.
        multiply_adds: setting -> those that its zeros leave.
        sparse: the settings that prune weights.
        words: how they were measured.
    """

    times: Mapping[str, Timing]
    multiply_adds: Mapping[str, float]
    sparse: Sequence[str]
    words: str


def network_times(options: argparse.Namespace) -> tuple[Times, Packed]:
    """The times of all settings' steps and packed networks: of the work dir, or measured now."""
    grid, work_dir = _grid(options)
    names = grid.select(options.only)
    runs = {run.setting: run for run in make_runs(grid, names, grid.seeds[:1])}
    steps = timed(work_dir / TIMES, runs)
    path = work_dir / PACKED
    if not path.is_file():
        found = _measure_packed(runs, options)
        write_text_atomically(json.dumps(found._asdict(), indent=1) + "\n", path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in runs if name not in raw["times"]]
    if missing:
        raise ValueError(f"{path} has no times of {missing}: remove it to measure all again.")
    return steps, Packed(
        {name: Timing(*timing) for name, timing in raw["times"].items()},
        raw["multiply_adds"],
        raw["sparse"],
        raw["words"],
    )


def _measure_packed(runs: Mapping[str, PlannedRun], options: argparse.Namespace) -> Packed:
    """With random weights and images, in turns; N:M masks are those of the weights."""
    packed: dict[str, Function] = {}
    left, sparse = {}, []
    for name, run in runs.items():
        config = as_trained(run.config)
        torch.manual_seed(run.seed)
        model = build_model(config).eval()
        strategy, selection = read_sparsity(config)
        strategy = strategy or get_strategy("dense")
        convert(sparse_root(model), strategy, **selection)
        if strategy.output is not None:
            sparse.append(name)
        network = deployable(model)
        channels = model.data_preprocessor.mean.numel()
        images = torch.randn(options.batch_size, channels, options.size, options.size)
        images = images.contiguous(memory_format=torch.channels_last)
        weights = gemm_weights(fold(network))
        shares = {key: w.count_nonzero().item() / w.numel() for key, w in weights.items()}
        counted = multiply_adds(network, images[:1])
        left[name] = sum(count * shares[key] for key, count in counted.items())
        packed[name] = functools.partial(pack(network, images), images)
    with torch.no_grad():
        times = compare(packed, options.repeats, CPU)
    place = surroundings(CPU)
    words = (
        f"{options.batch_size} images of {options.size} pixels, {place['threads']} threads, "
        f"{place['device']}, {place['instruction set']}, commit {place.get('commit', 'unknown')}"
    )
    return Packed(times, left, sparse, words)


def _page(results: Results, steps: Times, packed: Packed, out: Path) -> Document:
    grid, metric, place = results.grid, results.grid.metric, steps.machine
    dense, names = str(grid.baseline), results.measured()
    page = Document(
        f"{grid.title}: accuracy against the cost of the network",
        f"A training step with its data and optimizer: {place['threads']} threads, "
        f"{place['device']}, {place.get('instruction set', '')}, commit "
        f"{place.get('commit', 'unknown')}. The packed network: {packed.words}. Medians (and "
        "quartiles) of rounds in turns, with random weights, relative to dense. They were measured "
        f"apart from the trainings, which may have run beside other work. ±: half of {INTERVAL}.",
    )
    step, whole, work = steps.steps, packed.times, packed.multiply_adds
    costs = {
        name: (step[name].median / step[dense].median, whole[name].median / whole[dense].median)
        for name in names
    }
    rows = []
    for name in names:
        summary = results.summary(name, metric)
        change = "" if name == dense else change_cell(results.change(name, dense, metric))
        times = (str(step[name]), str(whole[name]), f"{work[name] / work[dense]:.2f}")
        label = grid.settings[name].label
        rows.append([label, len(summary.values), str(summary), *costs[name], change, *times])
    header = ["setting", "seeds", metric.label, *LABELS]
    header += [f"change from {grid.settings[dense].label}", "step, ms", "packed, ms"]
    page.add_table("Accuracy and cost", [*header, "multiply-adds of inference"], rows)
    caption = (
        f"Circles: dense weights; squares: pruned weights; bars: {INTERVAL}, of two seeds from one "
        "to the other; line: what no cheaper setting reaches."
    )
    drawn = _drawn(results, costs, packed.sparse)
    page.add_figure("Accuracy and cost", "pareto", caption, drawn, out)
    return page


def _drawn(
    results: Results, costs: Mapping[str, tuple[float, float]], sparse: Sequence[str]
) -> Figure:
    """A panel for each cost; settings are numbered, and named below."""
    grid, metric = results.grid, results.grid.metric
    summaries = {name: results.summary(name, metric) for name in costs}
    with figure(4 + 0.1 * len(summaries), ncols=2, sharey=True) as (drawn, axes):
        for axis, index, label in zip(axes, (0, 1), LABELS, strict=True):
            for number, (name, summary) in enumerate(summaries.items(), 1):
                x = costs[name][index]
                kind = name in sparse
                style = {"fmt": "os"[kind], "color": COLOURS[kind], "markersize": 4}
                named = f"{number}  {grid.settings[name].label}"
                reach = _reach(summary)
                axis.errorbar(x, summary.mean, reach, elinewidth=0.8, label=named, **style)
                axis.annotate(
                    str(number), (x, summary.mean), (3, 2), textcoords="offset points", size=7
                )
            best = front([(costs[name][index], found.mean) for name, found in summaries.items()])
            axis.plot(*zip(*best, strict=True), color=INK, linewidth=0.6, linestyle=":")
            axis.set(xlabel=f"{label}, dense = 1")
        axes[0].set_ylabel(metric.label)
        legend_below(drawn, axes[0], columns=2)
    return drawn


def _reach(summary: Summary) -> float:
    """Return half of a bar: the interval, or of two seeds, whose interval is wide, their range."""
    of_two = len(summary.values) == 2
    return (max(summary.values) - min(summary.values)) / 2 if of_two else summary.interval


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, accuracy) that are more accurate than all cheaper ones."""
    best: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((cost, accuracy))
    return best


if __name__ == "__main__":
    sys.exit(main())
