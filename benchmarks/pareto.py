"""Accuracy of a grid's settings against what they cost: a table and a figure.

    python benchmarks/pareto.py configs/ablation/cifar10_weight_gradient.yaml --threads 2
    python benchmarks/pareto.py configs/ablation/cifar10_frontier.yaml --costs network --threads 1

Costs are the multiply-adds and the time of all weight gradients of a training step. With --costs
network they are the times of a training step (as benchmarks/equal_time.py measures it) and of the
packed network, with its multiply-adds. Those times are taken once and lie in the work dir, so the
grid may be trained beside other work: measure on a quiet machine, first with --measure-only. Of the
grid, finished runs count.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from equal_time import TIMES, Times, timed
from matplotlib.figure import Figure
from torch import nn

from fst import convert, get_strategy, pack
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.cli.environment import surroundings
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, load_grid
from fst.lab.ablation.results import INTERVAL, Results, Summary, change_cell, collect
from fst.lab.ablation.runs import PlannedRun, as_trained, make_runs
from fst.lab.arguments import add_output
from fst.lab.benchmark import PLAIN, Function, Timing, compare, layer_shapes, time_layer
from fst.lab.document import Document, publish
from fst.lab.figures import COLOURS, INK, SMALL, figure, legend_below, style
from fst.lab.macs import Kinds, count_macs, count_step, total
from fst.lab.model import Training, from_config
from fst.rules.strategy import Strategy
from fst.training.engine.config import read_sparsity
from fst.training.engine.export import deployable
from fst.training.engine.model import build_model, sparse_root

PACKED = "packed.json"
KINDS: Mapping[str, Kinds] = {
    "conv": (nn.Conv2d,),
    "linear": (nn.Linear,),
    "all": (nn.Conv2d, nn.Linear),
}
CPU = torch.device("cpu")  # on which networks are packed


class Costs(NamedTuple):
    """Costs of the settings, and how they were measured.

    Attributes:
        what: of what these costs are.
        words: how they were measured.
        labels: of the two costs that are drawn.
        drawn: setting -> these, relative to dense.
        columns: title of a further column of the table -> setting -> its cell.
        sparse: the settings that prune weights.
    """

    what: str
    words: str
    labels: tuple[str, str]
    drawn: dict[str, tuple[float, float]]
    columns: dict[str, dict[str, object]]
    sparse: set[str]


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
    parser.add_argument(
        "--costs",
        choices=("gradients", "network"),
        default="gradients",
        help="(default: gradients)",
    )
    parser.add_argument(
        "--measure-only", action="store_true", help="take the times of --costs network, no more"
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
        if options.measure_only:
            network_times(options)
            return 0
        written = publish(run(options), options.out, command)
    print("\n".join(f"written: {path}" for path in written))
    return 0


def run(options: argparse.Namespace) -> Document:
    """Read the grid's finished runs, and measure what their settings cost."""
    grid, work_dir = _grid(options)
    results = collect(grid, work_dir, grid.select(options.only))
    names = results.measured()
    if not names:
        raise ValueError(f"{str(work_dir)!r} has no finished run of this grid.")
    if options.costs == "network":
        return _result(results, _of_network(results, *network_times(options)), options.out)
    settings = {name: _setting(results, name, work_dir, options) for name in names}
    return _result(results, _of_gradients(settings, options), options.out)


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
    multiply_adds, sparse = {}, []
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
        counted = count_macs(network, functools.partial(network, images[:1]))
        multiply_adds[name] = total(counted, "output").left
        packed[name] = functools.partial(pack(network, images), images)
    with torch.no_grad():
        times = compare(packed, options.repeats, CPU)
    place = surroundings(CPU)
    words = (
        f"{options.batch_size} images of {options.size} pixels, {place['threads']} threads, "
        f"{place['device']}, {place['instruction set']}, commit {place.get('commit', 'unknown')}"
    )
    return Packed(times, multiply_adds, sparse, words)


def _of_network(results: Results, steps: Times, packed: Packed) -> Costs:
    grid, names = results.grid, results.measured()
    if grid.baseline not in names:
        raise ValueError(f"the baseline must be among the finished settings, not only {names}.")
    step, whole = steps.steps, packed.times
    one, other = step[grid.baseline].median, whole[grid.baseline].median
    work = packed.multiply_adds[grid.baseline]
    changes = {name: results.change(name, grid.baseline, grid.metric) for name in names}
    columns: dict[str, dict[str, object]] = {
        f"change from {grid.settings[grid.baseline].label}": {
            name: "" if name == grid.baseline else change_cell(changes[name]) for name in names
        },
        "step, ms": {name: str(step[name]) for name in names},
        "packed, ms": {name: str(whole[name]) for name in names},
        "multiply-adds of inference": {
            name: f"{packed.multiply_adds[name] / work:.2f}" for name in names
        },
    }
    place = steps.machine
    return Costs(
        "the network",
        f"A training step with its data and optimizer: {place['threads']} threads, "
        f"{place['device']}, {place.get('instruction set', '')}, commit "
        f"{place.get('commit', 'unknown')}. The packed network: {packed.words}. Medians (and "
        "quartiles) of rounds in turns, with random weights, relative to dense. They were measured "
        "apart from the trainings, which may have run beside other work.",
        ("time of a training step", "time of the packed network"),
        {name: (step[name].median / one, whole[name].median / other) for name in names},
        columns,
        set(packed.sparse),
    )


class Setting(NamedTuple):
    """The training of a setting: its strategy, its sparse layers, and the share of the weight
    gradients' multiply-adds that it leaves.
    """

    training: Training
    strategy: Strategy
    converted: set[str]
    share_left: float


def _setting(results: Results, name: str, work_dir: Path, options: argparse.Namespace) -> Setting:
    made = work_dir / name / f"seed{results.of(name)[0].seed}.py"
    training = from_config(str(made), options.batch_size, (options.size, options.size))
    strategy = training.strategy or get_strategy("dense")
    converted = training.converted(strategy)
    counted = count_step(training, strategy, KINDS[_layers_of(training)])
    return Setting(training, strategy, converted, total(counted, "grad_weight").share_left)


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


def _of_gradients(settings: Mapping[str, Setting], options: argparse.Namespace) -> Costs:
    times = _times(settings, options)
    return Costs(
        "the weight gradients",
        f"Batch {options.batch_size}, {torch.get_num_threads()} threads, medians of "
        f"{options.repeats} rounds in turns. Costs are those of "
        "all weight gradients of a step, relative to plain PyTorch's.",
        ("multiply-adds", "time"),
        {name: (of.share_left, times[name] / times[PLAIN]) for name, of in settings.items()},
        {},
        {name for name, of in settings.items() if of.converted and of.strategy.output},
    )


def _result(results: Results, costs: Costs, out: Path) -> Document:
    grid, metric = results.grid, results.grid.metric
    result = Document(
        f"{grid.title}: accuracy against the cost of {costs.what}",
        f"{costs.words} ±: half of {INTERVAL}.",
    )
    rows = []
    for name, drawn in costs.drawn.items():
        summary = results.summary(name, metric)
        more = [column[name] for column in costs.columns.values()]
        label = grid.settings[name].label
        rows.append([label, len(summary.values), str(summary), *drawn, *more])
    header = ["setting", "seeds", metric.label, *costs.labels, *costs.columns]
    result.add_table("Accuracy and cost", header, rows)
    caption = (
        f"Circles: dense weights; squares: pruned weights; bars: {INTERVAL}, of two seeds from one "
        "to the other; line: what no cheaper setting reaches."
    )
    result.add_figure("Accuracy and cost", "pareto", caption, _drawn(results, costs), out)
    return result


def _drawn(results: Results, costs: Costs) -> Figure:
    """A panel for each cost; settings are numbered, and named below."""
    grid, metric = results.grid, results.grid.metric
    summaries = {name: results.summary(name, metric) for name in costs.drawn}
    with figure(4 + 0.1 * len(summaries), ncols=2, sharey=True) as (drawn, axes):
        for axis, index, label in zip(axes, (0, 1), costs.labels, strict=True):
            for number, (name, summary) in enumerate(summaries.items(), 1):
                x = costs.drawn[name][index]
                kind = name in costs.sparse
                style = {"fmt": "os"[kind], "color": COLOURS[kind], "markersize": 4}
                named = f"{number}  {grid.settings[name].label}"
                reach = _reach(summary)
                axis.errorbar(x, summary.mean, reach, elinewidth=0.8, label=named, **style)
                axis.annotate(
                    str(number), (x, summary.mean), (3, 2), textcoords="offset points", size=7
                )
            best = front(
                [(costs.drawn[name][index], found.mean) for name, found in summaries.items()]
            )
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
