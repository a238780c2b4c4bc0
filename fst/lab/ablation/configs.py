"""The config of each run of a grid; all are checked before anything is trained."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from mmengine.config import Config

from fst.basics.text import nearest
from fst.basics.values import is_integer
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid
from fst.training.engine.checks import check_config
from fst.training.engine.config import (
    DETECTION_KEYS,
    KNOWN_KEYS,
    known_keys,
    load_config,
    read_config,
    read_sparsity,
)
from fst.training.engine.epochs import set_epochs
from fst.training.engine.model import build_model

KEYS = KNOWN_KEYS | DETECTION_KEYS
DECIDED = {"randomness.seed": "`seeds` or --seeds", "work_dir": "--work-dir"}  # for each run


@dataclass(frozen=True)
class PlannedRun:
    """One training: a setting with a seed.

    ``fingerprint`` is a hash of everything that the config says, and of the fingerprint of the run
    that it starts from. ``length`` is the number of epochs (of iterations where the loop counts
    these), ``earlier`` that of the runs it starts from.
    """

    setting: str
    seed: int
    config: Config
    fingerprint: str
    length: int
    earlier: int
    start_from: str | None


def make_runs(
    grid: Grid, names: Sequence[str], seeds: Iterable[int], check: bool = True
) -> list[PlannedRun]:
    """The runs of the settings ``names`` with each seed, in the order in which they are started.

    Args:
        grid: The grid.
        names: Settings; what these start from has to be among them.
        seeds: The seeds of each setting.
        check: Whether the configs have to be fit for training, and their data at hand.

    Raises:
        ValueError: a config that nothing could train, with the name of its setting.
        FileNotFoundError: a file or folder that a config names is missing.
    """
    plain = {name: _configured(grid, name, check) for name in names}
    if check:
        _build_models(grid, plain)
    runs: list[PlannedRun] = []
    for seed in seeds:
        made: dict[str, PlannedRun] = {}
        for name in sorted(names, key=lambda name: len(grid.chain(name))):
            source = made.get(grid.settings[name].start_from or "")
            config = plain[name].copy()
            config.randomness = {**config.get("randomness", {}), "seed": seed}
            made[name] = PlannedRun(
                setting=name,
                seed=seed,
                config=config,
                fingerprint=_fingerprint(config, source),
                length=_length(config),
                earlier=source.length + source.earlier if source else 0,
                start_from=source.setting if source else None,
            )
        runs.extend(made.values())
    return runs


def write_config(config: Config, path: Path) -> None:
    """Write a config as a Python file of its own, without what it inherits from.

    `Config.dump` would lay the text out within a bare ``except``, which swallows Ctrl-C.
    """
    values = config.to_dict().items()
    lines = (f"{key} = {pformat(value, width=100, sort_dicts=False)}\n" for key, value in values)
    write_text_atomically("".join(lines), path)


def as_trained(config: Config) -> Config:
    """The config of a run as `fst train` reads it from the run's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.py"
        write_config(config, path)
        return load_config(str(path))


def parse_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Changes to a config by dotted names; refused are those that would change nothing."""
    for option, value in options.items():
        root = str(option).split(".")[0]
        if root not in KEYS:
            raise ValueError(
                f"{where}: {option!r}: {root!r} is no configuration key.{nearest(root, KEYS)}"
            )
        seeded = option == "randomness" and isinstance(value, Mapping) and "seed" in value
        decided = "randomness.seed" if seeded else option
        if decided in DECIDED:
            raise ValueError(f"{where}: {decided!r} is not for options: use {DECIDED[decided]}.")
    return {str(option): value for option, value in options.items()}


def _configured(grid: Grid, name: str, check: bool) -> Config:
    """The setting's config without a seed: base, sparsity, the grid's options, its own, epochs."""
    setting = grid.settings[name]
    with _named(grid, name):
        base = read_config(str(setting.base))
        known = known_keys(base)
        config = Config({k: v for k, v in base.to_dict().items() if k in known})
        if setting.sparsity is not None:
            config.sparsity = setting.sparsity
        for options in (grid.options, setting.options):
            config.merge_from_dict(parse_options(options, "options"))
        epochs = grid.epochs if setting.epochs is None else setting.epochs
        if epochs is not None:
            set_epochs(config, epochs)
        config.work_dir = None
        read_sparsity(config)
        if check:
            check_config(as_trained(config), ("train_dataloader", "val_dataloader"))
        _length(config)
    return config


def _build_models(grid: Grid, configs: Mapping[str, Config]) -> None:
    """Build each different classifier once: only its constructor knows what it takes."""
    built: list[Any] = []
    for name, config in configs.items():
        model = config.model, config.get("data_preprocessor")
        if config.model.get("type") == "Classifier" and model not in built:
            with _named(grid, name):
                build_model(config)
            built.append(model)


@contextmanager
def _named(grid: Grid, name: str) -> Iterator[None]:
    """Add the name of the setting to errors of the block."""
    where = f"{grid.path}: setting {name!r}"
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except Exception as error:  # a config can be wrong in any way
        raise ValueError(f"{where}: {error}") from error


def _length(config: Config) -> int:
    loop = config.get("train_cfg") or {}
    length = loop.get("max_epochs", loop.get("max_iters"))
    if not is_integer(length) or length < 1:
        raise ValueError(f"train_cfg={dict(loop)} has no max_epochs or max_iters above 0.")
    return length


def _fingerprint(config: Config, source: PlannedRun | None) -> str:
    content = [config.to_dict(), source.fingerprint if source else None]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
