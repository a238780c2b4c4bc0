"""Reading configs: names that nothing reads are refused."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config

from fst.basics.text import nearest
from fst.basics.values import check_integer
from fst.cli.options.paths import config_path
from fst.rules.strategy import Strategy
from fst.training.engine import data_root
from fst.training.engine.epochs import set_epochs
from fst.training.engine.hooks import SparsityHook
from fst.training.engine.packaged import drop_scope

KNOWN_KEYS = frozenset(
    """model work_dir train_dataloader val_dataloader test_dataloader train_cfg val_cfg test_cfg
    auto_scale_lr optim_wrapper param_scheduler val_evaluator test_evaluator default_hooks
    custom_hooks data_preprocessor load_from resume launcher env_cfg log_processor log_level
    visualizer default_scope randomness experiment_name model_wrapper_cfg custom_imports
    sparsity compile sync_bn find_unused_parameters activation_checkpointing
    efficient_conv_bn_eval data_root""".split()
)
DICTS = tuple(  # what Runner reads by key, so that a number would end in a traceback
    """model train_dataloader val_dataloader test_dataloader train_cfg val_cfg test_cfg
    optim_wrapper default_hooks env_cfg randomness auto_scale_lr model.architecture
    model.data_preprocessor optim_wrapper.optimizer train_dataloader.dataset
    val_dataloader.dataset test_dataloader.dataset""".split()
)
DETECTION_KEYS = frozenset({"classes", "bad_annotations"})  # default_scope "mmdet"


def load_config(
    path: str, options: Mapping[str, Any] | None = None, checkpoint: str | None = None
) -> Config:
    """Read a config and apply ``options`` ("train_dataloader.batch_size" -> 3) to it.

    Args:
        path: The config file, or the name of one of the package's ("fst::configs/...").
        options: Changes to it. "epochs" sets the training and its schedules, see `set_epochs`.
        checkpoint: Path of the checkpoint that will be used with it. Where classes are counted,
            they are the checkpoint's if it names them.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the config is of MMDetection, which is not installed.
        ValueError: the config cannot be run, or nothing reads one of its top-level names or an
            option.
    """
    config = read_config(path)
    known = known_keys(config)
    options = dict(options or {})
    epochs = options.pop("epochs", None)
    for option in options:
        root = option.split(".")[0]
        if root in known:
            continue
        helper = (
            f" {root!r} is a helper variable of the config, already used." if root in config else ""
        )
        raise ValueError(
            f"--cfg-options {option}: {root!r} is no configuration key.{helper}"
            f"{nearest(root, known)}"
        )
    try:
        config.merge_from_dict(options)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"--cfg-options: {error}") from error
    for key in DICTS:
        if not isinstance(value := _below(config, key), Mapping | None):
            raise ValueError(f"{key}={value!r} must be a dict.")
    if not isinstance(value := config.get("custom_hooks"), list | tuple | None):
        raise ValueError(f"custom_hooks={value!r} must be a list.")
    # MMEngine divides by the interval after the first epoch, and compares the rest later
    for key, least in (("max_epochs", 1), ("max_iters", 1), ("val_interval", 1), ("val_begin", 0)):
        check_integer(f"train_cfg.{key}", (config.get("train_cfg") or {}).get(key, 1), least)
    if epochs is not None:
        set_epochs(config, epochs)
    if _is_detector(config):
        _require_mmdet(path)
        from fst.training.detection.config import prepare
    else:
        prepare = data_root.prepare
    counted = {"data_root", "classes"} & config.keys()
    trained = data_root.classes_of_checkpoint(checkpoint) if counted else []
    prepare(config, data_root.datasets_of(config), trained, options)
    for helper in set(config) - known:
        config.pop(helper)  # used by now; in the copy in the work dir it would be refused
    return config


def _below(config: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key; None if there is none."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return value


def read_config(path: str) -> Config:
    """A config as its file and those that it inherits have it, with their helper variables.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the config is of MMDetection, which is not installed.
        ValueError: the config cannot be read, or nothing reads one of its top-level names.
    """
    path = config_path(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"config {path!r} does not exist.")
    if Path(path).suffix not in (".py", ".json", ".yaml", ".yml"):
        raise ValueError(f"config {path!r} must be a .py, .json or .yaml file.")
    config = _read(path)
    drop_scope(config._cfg_dict)
    check_names(Path(path), known_keys(config))
    return config


def known_keys(config: Config) -> frozenset[str]:
    """The top-level names of a config that something reads; a detector's are more."""
    return KNOWN_KEYS | DETECTION_KEYS if _is_detector(config) else KNOWN_KEYS


def _is_detector(config: Config) -> bool:
    return bool(config.get("default_scope") == "mmdet")


def _read(path: str) -> Config:
    try:
        if Path(path).suffix in (".yaml", ".yml"):  # MMEngine's reader crashes on deep nesting
            yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
        return Config.fromfile(path)
    except (ModuleNotFoundError, AssertionError) as error:  # of `_base_ = "package::..."`
        if "mmdet" in str(error):
            _require_mmdet(path)
        raise ImportError(f"config {path!r}: {error}") from error
    except (FileNotFoundError, ImportError):
        raise
    except SystemExit as error:
        raise ValueError(
            f"config {path!r} cannot be read: it ends the program (sys.exit({error.code!r}))."
        ) from error
    except Exception as error:  # a config is code that can fail in any way
        raise _unreadable(path, error) from error


def _unreadable(path: object, error: Exception) -> ValueError:
    words = " ".join(str(error).split())  # of YAML's errors, which take several lines
    return ValueError(f"config {str(path)!r} cannot be read: {type(error).__name__}: {words}")


def _require_mmdet(path: str) -> None:
    if importlib.util.find_spec("mmdet") is None:
        raise ImportError(
            f"config {path!r} needs MMDetection: pip install -c constraints.txt '.[train,det]'"
        )


def check_names(path: Path, known: Collection[str]) -> None:
    """Refuse top-level names of a config, or of the files it inherits, which nothing reads.

    A name counts as read in its own file, and where an heir refers to it as ``{{_base_.name}}``.
    Configs of packages (`mmdet::...`) are trusted.
    """
    for name, file in _unread_names(path.resolve(), known).items():
        raise ValueError(
            f"{file}: nothing reads {name!r}, so setting it changes nothing.{nearest(name, known)}"
        )


def _unread_names(path: Path, known: Collection[str]) -> dict[str, Path]:
    if not path.is_file():  # a base that does not exist: MMEngine says so
        return {}
    try:
        if path.suffix != ".py":
            return {str(key): path for key in Config._file2dict(str(path))[0] if key not in known}
        text = path.read_text(encoding="utf-8")
        names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        bases = Config._get_base_files(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    read = {name.id for name in names if isinstance(name.ctx, ast.Load)} | {*known, "_base_", "_"}
    unread = {name.id: path for name in names if name.id not in read}
    referred = set(re.findall(r"_base_\.(\w+)", text))
    for base in bases:
        if "::" not in base:
            inherited = _unread_names((path.parent / base).resolve(), known)
            unread |= {name: file for name, file in inherited.items() if name not in referred}
    return unread


def sparsity_hook(config: Mapping[str, Any]) -> SparsityHook | None:
    """The hook of a config's ``sparsity``; None if it has none.

    Raises:
        ValueError: an unknown key, strategy or value.
    """
    sparsity = config.get("sparsity")
    if sparsity is None:
        return None
    if not isinstance(sparsity, Mapping) or "strategy" not in sparsity:
        raise ValueError(f"sparsity={sparsity!r} must be a dict with the key 'strategy'.")
    if "type" in sparsity:
        raise ValueError("sparsity takes the arguments of SparsityHook, but no 'type'.")
    return SparsityHook(**sparsity)


def read_sparsity(config: Mapping[str, Any]) -> tuple[Strategy | None, dict[str, Any]]:
    """A config's strategy (None: dense), and the other arguments of its `fst.convert`.

    Raises:
        ValueError: an unknown key, strategy or value in the config's ``sparsity``.
    """
    hook = sparsity_hook(config)
    return (None, {}) if hook is None else (hook.strategy, hook.choice)
