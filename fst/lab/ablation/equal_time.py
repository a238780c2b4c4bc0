"""Equal time: every setting is trained for the seconds that the baseline's training takes."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from torch.utils.data import DataLoader

import fst
from fst.backends.timing import Timing, compare
from fst.checkpoint import write_text_atomically
from fst.engine.data import build_dataloader
from fst.engine.hooks import SparsityHook
from fst.engine.model import build_model, sparse_root
from fst.environment import surroundings
from fst.lab.ablation.configs import PlannedRun, as_trained, make_runs
from fst.lab.ablation.grid import Grid

FILE = "equal_time.json"
ROUNDS = 15
MOST = 20e3  # milliseconds of the slowest setting, after which no round begins
WARMUP = 3  # calls before the first round, in which layers choose their backends
LEARNING_RATE = 1e-6  # no step may change how long the next one takes


@dataclass(frozen=True)
class EqualTime:
    """What a training step of each setting takes, side by side.

    Attributes:
        baseline: the setting whose training tells how many seconds there are.
        steps: setting -> milliseconds of a step, the loading of its batch included.
        iterations: setting -> steps of an epoch.
        machine: all that times depend on, see `fst.environment.surroundings`.
    """

    baseline: str
    steps: Mapping[str, Timing]
    iterations: Mapping[str, int]
    machine: Mapping[str, Any]

    def seconds(self, setting: str) -> float:
        """Of an epoch, without validation."""
        return self.steps[setting].median * self.iterations[setting] / 1e3

    def epochs(self, setting: str, of_baseline: int) -> int:
        """The whole number of epochs next to the time of the baseline's; one at least."""
        share = self.seconds(self.baseline) / self.seconds(setting)
        return max(1, round(of_baseline * share))


def fitted(grid: Grid, work_dir: Path, names: Sequence[str]) -> tuple[Grid, EqualTime]:
    """The grid with each setting's epochs, by times that were measured earlier, or now.

    The times lie in the work dir, so that the same command goes on with the same epochs.

    Raises:
        ValueError: the grid has no baseline, or settings that start from others or whose loops
            count iterations; or earlier times leave out a setting.
    """
    if grid.baseline is None or grid.baseline not in names:
        raise ValueError(f"--equal-time needs the baseline among the settings, not {list(names)}.")
    chained = [name for name in names if grid.settings[name].start_from is not None]
    if chained:
        raise ValueError(f"--equal-time: {chained} start from other settings' trainings.")
    planned = {run.setting: run for run in make_runs(grid, names, grid.seeds[:1])}
    for name, run in planned.items():
        if "max_epochs" not in run.config.train_cfg:
            raise ValueError(f"--equal-time: setting {name!r} counts iterations, not epochs.")
    found = read(work_dir)
    if found is None:
        found = measure(grid.baseline, planned)
        _write(found, work_dir)
    missing = [name for name in names if name not in found.steps]
    if missing or found.baseline != grid.baseline:
        raise ValueError(
            f"{work_dir / FILE} has no times of {missing or [grid.baseline]} beside the others': "
            "give another --work-dir, or remove the file to measure all settings again."
        )
    length = planned[grid.baseline].length
    lengths = {name: found.epochs(name, length) for name in names}
    return replace(grid, lengths=lengths), found


def measure(baseline: str, runs: Mapping[str, PlannedRun]) -> EqualTime:
    """Time a training step of each run, with its data, model and optimizer, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    return EqualTime(baseline, times, iterations, surroundings(device))


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


def read(work_dir: Path) -> EqualTime | None:
    """What was measured for a work dir; None if nothing was."""
    path = work_dir / FILE
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    return EqualTime(**{**raw, "steps": {name: Timing(*t) for name, t in raw["steps"].items()}})


def _write(found: EqualTime, work_dir: Path) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    steps = {name: list(timing) for name, timing in found.steps.items()}
    content = {**vars(found), "steps": steps}
    write_text_atomically(json.dumps(content, indent=1, default=str) + "\n", work_dir / FILE)
