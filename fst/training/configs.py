"""Configs as their files say, without the imports of a training.

MMEngine looks up `fst::configs/demo_digits.py` in `_base_` of a config below fst/.mim.
"""

from __future__ import annotations

import importlib.util
import re
import symtable
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE

from fst.basics.text import nearest
from fst.basics.values import check_integer
from fst.cli.options.paths import config_path

MODULE2PACKAGE["fst"] = "fst"  # the package whose folder MMEngine searches for `fst::`

KNOWN_KEYS = frozenset(
    """model work_dir train_dataloader val_dataloader test_dataloader train_cfg val_cfg test_cfg
    auto_scale_lr optim_wrapper param_scheduler val_evaluator test_evaluator default_hooks
    custom_hooks data_preprocessor load_from resume launcher env_cfg log_processor log_level
    visualizer default_scope randomness experiment_name model_wrapper_cfg custom_imports
    sparsity compile sync_bn find_unused_parameters activation_checkpointing
    efficient_conv_bn_eval data_root""".split()
)
DETECTION_KEYS = frozenset({"classes", "bad_annotations"})  # default_scope "mmdet"
# MMEngine divides by the interval after the first epoch, and compares the rest later
NUMBERS = {"max_epochs": 1, "max_iters": 1, "val_interval": 1, "val_begin": 0}


def read_config(path: str, options: Mapping[str, Any] | None = None) -> Config:
    """A config as its file and those that it inherits have it, with their helper variables.

    Args:
        path: The config file, or the name of one of the package's ("fst::configs/...").
        options: Changes ("train_dataloader.batch_size" -> 3).

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the config is of MMDetection, which is not installed.
        ValueError: the config cannot be read, or nothing reads one of its top-level names or an
            option.
    """
    path = config_path(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"config {path!r} does not exist.")
    if Path(path).suffix not in (".py", ".json", ".yaml", ".yml"):
        raise ValueError(f"config {path!r} must be a .py, .json or .yaml file.")
    config = _read(path)
    _drop_scope(config._cfg_dict)
    _check_names(Path(path).resolve(), known := known_keys(config))
    for option, value in (options or {}).items():
        root, *_ = keys = option.split(".")
        if root not in known:
            helper = " It is a helper variable of the config, already used." * (root in config)
            raise ValueError(
                f"--cfg-options {option}: {root!r} is no configuration key.{helper}"
                f"{nearest(root, known)}"
            )
        old: Any = config._cfg_dict
        for key in keys:
            old = old.get(key) if isinstance(old, Mapping) else None
        for kind in (dict, list):
            if isinstance(old, kind) and not isinstance(value, kind | None):
                raise ValueError(f"{option}={value!r} must be a {kind.__name__}.")
    try:
        config.merge_from_dict(dict(options or {}))
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"--cfg-options: {error}") from error
    for key, least in NUMBERS.items():
        check_integer(f"train_cfg.{key}", (config.get("train_cfg") or {}).get(key, least), least)
    if is_detector(config) and importlib.util.find_spec("mmdet") is None:
        raise _no_mmdet(path)
    return config


def known_keys(config: Config) -> frozenset[str]:
    """The top-level names of a config that something reads; a detector's are more."""
    return KNOWN_KEYS | DETECTION_KEYS if is_detector(config) else KNOWN_KEYS


def is_detector(config: Config) -> bool:
    """True if the config is of a model of MMDetection."""
    return bool(config.get("default_scope") == "mmdet")


def _read(path: str) -> Config:
    try:
        try:
            return Config.fromfile(path)
        except SystemError:  # CPython before 3.12 mistakes what another thread parses meanwhile
            return Config.fromfile(path)
    except (ModuleNotFoundError, AssertionError) as error:  # of `_base_ = "package::..."`
        if "mmdet" in str(error) and importlib.util.find_spec("mmdet") is None:
            raise _no_mmdet(path) from error
        raise ImportError(f"config {path!r}: {error}") from error
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # a config is code that can fail in any way
        words = " ".join(str(error).split())  # of YAML's errors, which take several lines
        raise ValueError(
            f"config {path!r} cannot be read: {type(error).__name__}: {words}"
        ) from error


def _no_mmdet(path: str) -> ImportError:
    return ImportError(
        f"config {path!r} needs MMDetection: pip install -c constraints.txt '.[train,det]'"
    )


def _drop_scope(value: Any) -> None:
    """Take away the mark by which MMEngine would look for a registry of this package's own."""
    if isinstance(value, dict):
        if value.get("_scope_") == "fst":
            del value["_scope_"]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _drop_scope(part)


def _check_names(path: Path, known: Collection[str], heirs: str = "") -> None:
    """Refuse top-level names of a config, or of the files it inherits, which nothing reads.

    A name counts as read in its own file, and where an heir refers to it as ``{{_base_.name}}``.
    Configs of packages (`mmdet::...`) are trusted.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        table = symtable.symtable(text, str(path), "exec")
        assigned = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
        names = assigned - _referenced(table)
    else:
        names = set(Config._file2dict(str(path))[0])
    for name in sorted(names - {*known, "_base_", "_"}):
        if not re.search(rf"_base_\.{re.escape(name)}\b", heirs):
            raise ValueError(
                f"{path}: nothing reads {name!r}, so setting it changes nothing."
                f"{nearest(name, known)}"
            )
    for base in Config._get_base_files(str(path)):
        if "::" not in base:
            _check_names((path.parent / base).resolve(), known, heirs + text)


def _referenced(table: symtable.SymbolTable) -> set[str]:
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    return own.union(*map(_referenced, table.get_children()))
