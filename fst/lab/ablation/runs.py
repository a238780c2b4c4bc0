"""The runs of a grid: their configs, all checked before anything is trained, and the training.

WORK/<setting>/seed<k>.py is the config of a run, WORK/<setting>/seed<k>/ its work dir with log.txt,
what the process printed. result.json there says that the run has finished.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from mmengine.config import Config

from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid
from fst.lab.document import made_with
from fst.training.configs import known_keys, read_config
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.checks import check_config
from fst.training.engine.config import load_config, read_sparsity, set_epochs
from fst.training.engine.model import build_model

TRAIN = ["-m", "fst", "train"]  # the arguments of Python that start a training
POLL_SECONDS = 0.25
RESULT = "result.json"


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One training: a setting with a seed, which may start from another run's checkpoint.

    ``epochs`` is its length (iterations where the loop counts these), after that of the source:
    "10 + 10".
    """

    setting: str
    seed: int
    config: Config
    epochs: str
    source: PlannedRun | None

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}"

    def folder(self, work_dir: Path) -> Path:
        """Its work dir; the config lies beside it, with the ending .py."""
        return work_dir / self.setting / f"seed{self.seed}"

    def is_finished(self, work_dir: Path) -> bool:
        """True if it was trained to its end."""
        return (self.folder(work_dir) / RESULT).is_file()

    def changes(self, work_dir: Path) -> str:
        """Lines in which its config differs from the one that was started; "" if none does."""
        path, new = self.folder(work_dir).with_suffix(".py"), as_text(self.config)
        old = path.read_text(encoding="utf-8") if path.is_file() else new
        lines = difflib.ndiff(old.splitlines(), new.splitlines())
        return "\n".join(line for line in lines if line[0] in "+-")


def refuse_changed(runs: Iterable[PlannedRun], work_dir: Path, option: str) -> None:
    """Raise ValueError where a run was started with another config; ``option`` names the folder."""
    for run in runs:
        if changes := run.changes(work_dir):
            folder = run.folder(work_dir)
            raise ValueError(
                f"{folder} was trained with another config; give another {option}, or remove "
                f"{folder} and {folder.name}.py:\n{changes}"
            )


def make_runs(grid: Grid, names: Sequence[str], seeds: Iterable[int]) -> list[PlannedRun]:
    """The runs of the settings ``names`` with each seed; those that others start from come first.

    ``names`` are as `Grid.select` returns them.

    Raises:
        ValueError: a config that nothing could train, with the name of its setting.
    """
    plain = {}
    for name in names:
        try:
            plain[name] = _configured(grid, name)
        except Exception as error:  # a config can be wrong in any way
            raise ValueError(f"{grid.path}: setting {name!r}: {error}") from error
    runs: list[PlannedRun] = []
    for seed in seeds:
        made: dict[str | None, PlannedRun] = {}
        for name, config in plain.items():
            own = config.copy()
            own.randomness = {**config.get("randomness", {}), "seed": seed}
            epochs = str(config.train_cfg.get("max_epochs") or config.train_cfg["max_iters"])
            source = made.get(grid.settings[name].start_from)
            if source is not None:
                epochs = f"{source.epochs} + {epochs}"
            made[name] = PlannedRun(name, seed, own, epochs, source)
        runs.extend(made.values())
    return runs


def _configured(grid: Grid, name: str) -> Config:
    """The setting's config without a seed: base, sparsity, the grid's options, its own, epochs."""
    setting = grid.settings[name]
    base = read_config(str(setting.base))
    config = Config({k: v for k, v in base.to_dict().items() if k in known_keys(base)})
    if setting.sparsity is not None:
        config.sparsity = setting.sparsity
    decided = config.get("work_dir"), config.get("randomness", {}).get("seed")
    for options in (grid.options, setting.options):
        config.merge_from_dict(options)
    if decided != (config.get("work_dir"), config.get("randomness", {}).get("seed")):
        raise ValueError(
            f"options {[*grid.options, *setting.options]}: a seed or a work_dir is not for "
            "options; use --seeds and --work-dir."
        )
    epochs = grid.epochs if setting.epochs is None else setting.epochs
    if epochs is not None:
        set_epochs(config, epochs)
    config.work_dir = None
    trained = as_trained(config)
    read_sparsity(trained)
    check_config(trained, ("train_dataloader", "val_dataloader"))
    if config.model.get("type") == "Classifier":  # only its constructor knows what it takes
        build_model(trained)
    return config


def as_text(config: Config) -> str:
    """The config as a Python file of its own.

    `Config.dump` would format it within a bare ``except``, which swallows Ctrl-C.
    """
    values = config.to_dict().items()
    return "".join(f"{key} = {pformat(v, width=100, sort_dicts=False)}\n" for key, v in values)


def as_trained(config: Config) -> Config:
    """The config of a run as `fst train` reads it from the run's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.py"
        path.write_text(as_text(config), encoding="utf-8")
        return load_config(str(path))


def train(runs: Sequence[PlannedRun], work_dir: Path, jobs: int, threads: str) -> bool:
    """Train the runs that are not finished, each in a process; interrupted ones go on.

    Args:
        runs: those that others start from come first.
        work_dir: of the grid.
        jobs: processes at a time.
        threads: OMP_NUM_THREADS of each process.

    Returns:
        Whether all have finished.
    """
    waiting = [run for run in runs if not run.is_finished(work_dir)]
    running: dict[PlannedRun, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            ready = [r for r in waiting if r.source is None or r.source.is_finished(work_dir)]
            for run in ready[: jobs - len(running)]:
                waiting.remove(run)
                running[run] = _start(run, work_dir, threads)
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for run in [run for run, process in running.items() if process.poll() is not None]:
                _finish(run, work_dir, running.pop(run).returncode)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    for run in waiting:
        print(f"{run} not started: {run.source}, which it starts from, failed")
    return all(run.is_finished(work_dir) for run in runs)


def _start(run: PlannedRun, work_dir: Path, threads: str) -> subprocess.Popen[bytes]:
    folder = run.folder(work_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".py")
    write_text_atomically(as_text(run.config), config)
    words = [sys.executable, *TRAIN, str(config), "--work-dir", str(folder)]
    if checkpoint := newest_checkpoint(folder):
        words.append("--resume")
    elif run.source is not None:
        words += ["--cfg-options", f"load_from={newest_checkpoint(run.source.folder(work_dir))}"]
    print(f"{run} {'goes on' if checkpoint else 'starts'}", flush=True)
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        )


def _finish(run: PlannedRun, work_dir: Path, status: int) -> None:
    """Record a training that has ended with this exit status, and say how it ended."""
    folder = run.folder(work_dir)
    if status != 0:
        log = folder / "log.txt"
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        print(f"{run} failed with exit status {status}: {last} (see {log})", flush=True)
        return
    result = {"epochs": run.epochs, "made with": made_with()}
    write_text_atomically(json.dumps(result, indent=1) + "\n", folder / RESULT)
    print(f"{run} done", flush=True)
