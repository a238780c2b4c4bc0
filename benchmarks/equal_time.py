"""Trains the settings of a grid for the same time, and draws accuracy over seconds.

    python benchmarks/equal_time.py GRID --work-dir DIR [--seconds S] [options of fst ablate]

A training step of every setting is timed first, in turns, with its data, model and optimizer. Each
setting then gets the whole number of epochs next to S seconds, and its schedule is stretched to
them. Without --seconds, S is the time of the baseline's training. The times lie in
DIR/equal_time.json, so that the same command goes on with the same epochs; DIR/equal_time.yaml is
the grid that `fst ablate` trains. With --dry-run the steps are timed and the runs listed.

So time on a quiet machine first, with --dry-run; the trainings may then run beside other work.
--times takes the times of another DIR: choices on a validation split get the same epochs.

Writes, beside the results of `fst ablate`, DIR/over_time.md and DIR/over_time.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from torch.utils.data import DataLoader

import fst
from fst import cli
from fst.backends.timing import Timing, compare
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.basics.machine import keep_freed_memory
from fst.basics.values import check_number
from fst.cli.environment import surroundings
from fst.cli.options.parsing import add_cfg_options
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, load_grid
from fst.lab.ablation.results import INTERVAL, Results, RunResult, change_cell, collect
from fst.lab.ablation.runs import PlannedRun, as_trained, make_runs
from fst.lab.document import Document, Figure, Table, markdown
from fst.lab.figures import INK, draw_curves, figure, legend_below, save
from fst.training.engine.data.loader import build_dataloader
from fst.training.engine.hooks.sparsity import SparsityHook
from fst.training.engine.model import build_model, sparse_root

TIMES, GRID = "equal_time.json", "equal_time.yaml"
ROUNDS = 15
MOST = 20e3  # milliseconds of the slowest setting, after which no round begins
WARMUP = 3  # calls before the first round, in which layers choose their backends
LEARNING_RATE = 1e-6  # no step may change how long the next one takes
VALIDATIONS = 10  # of a training: a curve


@dataclass(frozen=True)
class Times:
    """Times of a training step of each setting, side by side.

    Attributes:
        steps: setting -> milliseconds of a step, the loading of its batch included.
        iterations: setting -> steps of an epoch.
        machine: all that times depend on, see `fst.cli.environment.surroundings`.
    """

    steps: Mapping[str, Timing]
    iterations: Mapping[str, int]
    machine: Mapping[str, Any]

    def seconds(self, setting: str) -> float:
        """Of an epoch, without validation."""
        return self.steps[setting].median * self.iterations[setting] / 1e3

    def epochs(self, setting: str, budget: float) -> int:
        """The whole number of epochs next to ``budget`` seconds; one at least."""
        return max(1, round(budget / self.seconds(setting)))


def main(argv: Sequence[str] | None = None) -> int:
    """Time, train, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path, help="grid file, or fst::configs/ablation/...")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--times", type=Path, help="of the steps (DIR/equal_time.json)")
    parser.add_argument("--seconds", type=float, help="of each training (as the baseline's)")
    parser.add_argument("--epochs", type=positive, help="of the baseline, instead of its config's")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="only these settings")
    add_cfg_options(parser, "changes to the configs of all settings")
    add_traceback(parser)
    options, others = parser.parse_known_args(argv)
    work_dir = options.work_dir
    with user_errors(options):
        if options.seconds is not None:
            check_number("--seconds", options.seconds, "(0, inf)")
        if options.times is not None and not options.times.is_file():
            raise FileNotFoundError(f"--times={str(options.times)!r} does not exist or is no file.")
        grid = load_grid(options.grid)
        changes = {**grid.options, **options.cfg_options}
        grid = replace(grid, options=changes, epochs=options.epochs or grid.epochs)
        names = grid.select(options.only)
        runs = _plan(grid, names)
        times = timed(options.times or work_dir / TIMES, runs)
        seconds = options.seconds or int(runs[grid.baseline].epochs) * times.seconds(grid.baseline)
        path = _write_grid(grid, times, names, seconds, work_dir)
        fitted = load_grid(path)
    print(f"{seconds:.0f} s for each setting")
    for name in names:
        epochs = fitted.settings[name].epochs
        print(f"{name}: {times.steps[name]} ms a step, {epochs} epochs")
    command = ["ablate", str(path), "--work-dir", str(work_dir), "--only", *names, *others]
    status = cli.main(command)
    if "--dry-run" not in others:
        results = collect(fitted, work_dir, names)
        if grid.baseline in results.measured():
            words = sys.argv[1:] if argv is None else argv
            write(results, times, seconds, work_dir, shlex.join(["python", __file__, *words]))
    return status


def _plan(grid: Grid, names: Sequence[str]) -> dict[str, PlannedRun]:
    """A run of each setting, of the first seed.

    Raises:
        ValueError: the grid has no baseline, or settings that start from others or whose loops
            count iterations.
    """
    if grid.baseline is None or grid.baseline not in names:
        raise ValueError(f"the baseline must be among the settings, not only {list(names)}.")
    chained = [name for name in names if grid.settings[name].start_from is not None]
    if chained:
        raise ValueError(f"settings {chained} start from other settings' trainings.")
    planned = {run.setting: run for run in make_runs(grid, names, grid.seeds[:1])}
    for name, run in planned.items():
        if "max_epochs" not in run.config.train_cfg:
            raise ValueError(f"setting {name!r} counts iterations, not epochs.")
    return planned


def timed(path: Path, runs: Mapping[str, PlannedRun]) -> Times:
    """The times of a file; without it they are measured now, and written there.

    Raises:
        ValueError: earlier times leave out a setting.
    """
    if not path.is_file():
        found = measure(runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**vars(found), "steps": {name: list(t) for name, t in found.steps.items()}}
        write_text_atomically(json.dumps(content, indent=1, default=str) + "\n", path)
        return found
    raw = json.loads(path.read_text(encoding="utf-8"))
    steps = {name: Timing(*timing) for name, timing in raw["steps"].items()}
    missing = [name for name in runs if name not in steps]
    if missing:
        raise ValueError(
            f"{path} has no times of {missing} beside the others': give another --work-dir, or "
            "remove the file to measure all settings again."
        )
    return Times(steps, raw["iterations"], raw["machine"])


def measure(runs: Mapping[str, PlannedRun]) -> Times:
    """Time a training step of each run, with its data, model and optimizer, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as a training does
    loaders: list[tuple[Any, DataLoader, Iterator[Any]]] = []
    steps: dict[str, Callable[[], object]] = {}
    iterations = {}
    for name, run in runs.items():
        config = as_trained(run.config)
        torch.manual_seed(run.seed)
        model = build_model(config)  # first: it sets the scope in which data sets are found
        described = config.train_dataloader.to_dict()
        known = next((entry for entry in loaders if entry[0] == described), None)
        if known is None:
            loader = build_dataloader(config.train_dataloader, seed=run.seed)
            known = (described, loader, itertools.chain.from_iterable(itertools.repeat(loader)))
            loaders.append(known)
        iterations[name] = len(known[1])
        steps[name] = _step(config, model.to(device).train(), known[2], run.seed)
    times = compare(steps, ROUNDS, device, WARMUP, MOST)
    return Times(times, iterations, surroundings(device))


def _step(
    config: Config, model: BaseModel, batches: Iterator[Any], seed: int
) -> Callable[[], object]:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # mmengine says each parameter's options, for every setting
    try:
        optimizer = build_optim_wrapper(model, config.optim_wrapper)
    finally:
        logging.disable(before)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    if config.get("sparsity") is not None:
        hook = SparsityHook(**config.sparsity)
        root = sparse_root(model)
        fst.convert(root, hook.strategy, **hook.choice)
        fst.seed_random_rules(root, seed)
        fst.attach(root, optimizer.optimizer, total_steps=10**6, steps_per_epoch=10**3)
    return lambda: model.train_step(next(batches), optimizer)


def _write_grid(
    grid: Grid, times: Times, names: Sequence[str], seconds: float, work_dir: Path
) -> Path:
    """The grid with the epochs of each setting, as a file for `fst ablate`."""
    settings = {}
    for name in names:
        epochs = times.epochs(name, seconds)
        validation = {"train_cfg.val_interval": max(1, epochs // VALIDATIONS)}
        options = {**grid.settings[name].options, **validation}
        settings[name] = {"epochs": epochs, "options": options}
    content = {"extends": str(grid.path.resolve()), "options": grid.options, "settings": settings}
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / GRID
    plain = json.loads(json.dumps(content))  # YAML has no tuples
    write_text_atomically(yaml.safe_dump(plain, sort_keys=False), path)
    return path


def write(results: Results, times: Times, budget: float, folder: Path, command: str) -> None:
    """Write over_time.md and over_time.png."""
    target = results.summary(results.grid.baseline, results.grid.metric).mean
    document = Document(
        f"{results.grid.title}: equal time",
        command=command,
        tables=[_table(results, times, budget, target)],
        figures=[_figure(results, times, target, folder)],
    )
    write_text_atomically(markdown(document), folder / "over_time.md")


def _curve(results: Results, run: RunResult, times: Times) -> dict[float, float]:
    """Seconds of training -> metric."""
    metric, seconds = results.grid.metric, times.seconds(run.setting)
    logged = run.log.validation.get(metric.key, {})
    return {epoch * seconds: metric.scale * value for epoch, value in logged.items()}


def _seconds_to(results: Results, run: RunResult, times: Times, target: float) -> float | None:
    """Seconds until a run's validation first reached ``target``; None if it never did."""
    curve = _curve(results, run, times).items()
    return next((seconds for seconds, value in curve if value >= target), None)


def _table(results: Results, times: Times, budget: float, target: float) -> Table:
    grid, metric = results.grid, results.grid.metric
    label = grid.settings[grid.baseline].label
    columns = ["setting", "step, ms", "epochs", "seconds", metric.label, "runs"]
    columns += [f"change from {label}", f"seconds to {label}'s {target:.2f}"]
    rows: list[list[object]] = []
    for name in results.measured():
        runs = results.of(name)
        reached = [_seconds_to(results, run, times, target) for run in runs]
        found = [seconds for seconds in reached if seconds is not None]
        text = "not reached"
        if found:
            text = f"{statistics.fmean(found):.0f} ({len(found)} of {len(runs)} runs)"
        epochs = grid.settings[name].epochs
        seconds = f"{epochs * times.seconds(name):.0f}"
        summary = str(results.summary(name, metric))
        step = str(times.steps[name])
        paired = results.change(name, grid.baseline, metric)
        change = "" if name == grid.baseline else change_cell(paired)
        first = [grid.settings[name].label, step, epochs, seconds]
        rows.append([*first, summary, len(runs), change, text])
    caption = (
        f"Every setting had {budget:.0f} s, to the nearest whole epoch, its schedule stretched to "
        "them. Seconds are steps times the step's "
        f"time: the median (and quartiles) of up to {ROUNDS} rounds in which all settings take "
        "turns, loading, augmentation and optimizer included, with random weights, on "
        f"{times.machine['device']}, {times.machine.get('instruction set', '')}, "
        f"{times.machine['threads']} threads, autotuner {times.machine['autotuner']}, commit "
        f"{times.machine.get('commit', 'unknown')}; validation is not counted. They were measured "
        "before the trainings, which may have run beside other work. Changes are paired by seed, n "
        f"of them. The last column: the first of about {VALIDATIONS} validations that reaches the "
        f"mean of {label}'s ends, mean over the runs that reach it. "
        f"±: half of {INTERVAL}; a single seed has none."
    )
    return Table("At equal time", columns, rows, caption)


def _figure(results: Results, times: Times, target: float, folder: Path) -> Figure:
    grid, metric = results.grid, results.grid.metric
    curves = {
        grid.settings[name].label: [_curve(results, run, times) for run in results.of(name)]
        for name in results.measured()
    }
    with figure(3.6 + 0.22 * math.ceil(len(curves) / 2)) as (drawn, axis):
        draw_curves(axis, curves, "seconds of training", metric.label)
        axis.axhline(target, color=INK, linewidth=0.8, linestyle=":")
        legend_below(drawn, axis, columns=2)
        file = save(drawn, folder, "over_time")
    caption = (
        "Mean over the seeds and range from the lowest to the highest, over steps times the "
        f"measured time of a step ({times.machine['device']}). Dotted: where "
        f"{grid.settings[grid.baseline].label} ends."
    )
    return Figure(title=f"{metric.label} at equal time", file=file, caption=caption)


if __name__ == "__main__":
    sys.exit(main())
