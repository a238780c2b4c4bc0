"""Configs: what would be ignored or fail later is refused before any work is done."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.registry import DATASETS, OPTIMIZERS

from fst.basics.text import nearest, suggest
from fst.engine.data import ImageDataset, TimmStream
from fst.engine.hooks import ModelEMAHook, SparsityHook
from fst.engine.packaged import config_path, drop_scope
from fst.engine.recipe import check_keys
from fst.rules.strategy import Strategy

KNOWN_KEYS = frozenset(
    """model work_dir train_dataloader val_dataloader test_dataloader train_cfg val_cfg test_cfg
    auto_scale_lr optim_wrapper param_scheduler val_evaluator test_evaluator default_hooks
    custom_hooks data_preprocessor load_from resume launcher env_cfg log_processor log_level
    visualizer default_scope randomness experiment_name model_wrapper_cfg custom_imports
    sparsity ema compile sync_bn find_unused_parameters activation_checkpointing
    efficient_conv_bn_eval""".split()
)
_OF_ANY_HOOK = {"priority", "_scope_"}
DETECTION_KEYS = frozenset({"classes", "bad_annotations", "data_root"})  # default_scope "mmdet"


def load_config(
    path: str, options: Mapping[str, Any] | None = None, checkpoint: str | None = None
) -> Config:
    """Read a config and apply ``options`` ("train_cfg.max_epochs" -> 3) to it.

    Args:
        path: The config file, or the name of one of the package's ("fst::configs/...").
        options: Changes to it.
        checkpoint: Path of the checkpoint that will be used with it: where the config of a
            detector says classes="auto", they are the checkpoint's if it names them.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the config is of MMDetection, which is not installed.
        SyntaxError: the config is no Python.
        ValueError: the config cannot be run, or nothing reads one of its top-level names or an
            option.
    """
    config = read_config(path)
    known = known_keys(config)
    for option in options or {}:
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
        config.merge_from_dict(dict(options or {}))
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"--cfg-options: {error}") from error
    if _is_detector(config):
        _require_mmdet(path)
        from fst.detection.config import prepare

        prepare(config, checkpoint, options or {})
    _check_lengths(config.get("train_cfg") or {})
    for helper in set(config) - known:
        config.pop(helper)  # used by now; in the copy in the work dir it would be refused
    return config


def read_config(path: str) -> Config:
    """A config as its file and those that it inherits have it, with their helper variables.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the config is of MMDetection, which is not installed.
        SyntaxError: the config is no Python.
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


def _check_lengths(train_cfg: Mapping[str, Any]) -> None:
    """MMEngine divides by the interval after the first epoch, and asserts the rest later."""
    for key in ("max_epochs", "max_iters", "val_interval"):
        value = train_cfg.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"train_cfg.{key}={value!r} must be a whole number, at least 1.")


def _read(path: str) -> Config:
    try:
        check_names(Path(path), KNOWN_KEYS | DETECTION_KEYS)
        return Config.fromfile(path)
    except (ModuleNotFoundError, AssertionError) as error:  # of `_base_ = "package::..."`
        if "mmdet" in str(error):
            _require_mmdet(path)
        raise ImportError(f"config {path!r}: {error}") from error
    except (OSError, ImportError, SyntaxError, ValueError):
        raise
    except Exception as error:  # a config is code that can fail in any way
        kind = type(error).__name__
        raise ValueError(f"config {path!r} cannot be read: {kind}: {error}") from error


def _require_mmdet(path: str) -> None:
    if importlib.util.find_spec("mmdet") is None:
        raise ImportError(
            f"config {path!r} needs MMDetection: pip install -c constraints.txt '.[train,det]'"
        )


def check_names(path: Path, known: Collection[str] = KNOWN_KEYS) -> None:
    """Refuse top-level names of a config, or of the files it inherits, which nothing reads.

    A name counts as read in its own file, and where an heir refers to it as ``{{_base_.name}}``.
    Configs of packages (`mmdet::...`) are trusted.
    """
    unread = _unread_names(path.resolve(), known)
    if unread:
        name, file = next(iter(unread.items()))
        raise ValueError(
            f"{file}: nothing reads {name!r}, so setting it changes nothing.{nearest(name, known)}"
        )


def _unread_names(path: Path, known: Collection[str]) -> dict[str, Path]:
    if path.suffix != ".py":
        keys = Config._file2dict(str(path))[0] if path.is_file() else {}
        return {str(key): path for key in keys if key not in known}
    text = path.read_text(encoding="utf-8")
    # {{_base_.name}} and {{ fileBasename }} are no Python until mmengine has substituted them
    references = set(re.findall(r"_base_\.(\w+)", text))
    tree = ast.parse(re.sub(r"\{\{.*?\}\}", "0", text), filename=str(path))
    assigned = {name for node in tree.body for name in _assigned_names(node)}
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    inherited: dict[str, Path] = {}
    for base in _bases(path, tree):
        inherited |= _unread_names(base, known)
    own = dict.fromkeys(assigned - read - {*known, "_base_"}, path)
    return {name: file for name, file in inherited.items() if name not in references} | own


def _assigned_names(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def _bases(path: Path, tree: ast.Module) -> Iterator[Path]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and list(_assigned_names(node)) == ["_base_"]:
            value = ast.literal_eval(node.value)
            for name in [value] if isinstance(value, str) else value:
                if "::" not in name:
                    yield (path.parent / name).resolve()


def check_config(config: Config, dataloaders: Sequence[str]) -> None:
    """Check what can be checked without building anything: sparsity, averaging, data, checkpoints.

    Args:
        config: The whole config.
        dataloaders: Which of its dataloaders are going to be used.

    Raises:
        FileNotFoundError: a data folder or a checkpoint is missing.
        ValueError: anything else.
    """
    if "model" not in config:
        raise ValueError(f"config {config.filename!r} has no `model`.")
    read_sparsity(config)
    if config.get("ema") is not None:
        check_keys("ema", ModelEMAHook, config.ema)
        ModelEMAHook(**config.ema)
    for name in dataloaders:
        if config.get(name) is not None:
            for dataset in _datasets(config[name].get("dataset")):
                _check_dataset(dataset, name, config.get("default_scope") or "mmengine")
    if config.get("default_scope") == "mmdet":
        from fst.detection.config import check_files

        check_files(config, dataloaders)
    saving = dict((config.get("default_hooks") or {}).get("checkpoint") or {})
    if saving.pop("type", None) == "CheckpointHook":
        check_keys("default_hooks.checkpoint", CheckpointHook, saving.keys() - _OF_ANY_HOOK)
    optimizer = (config.get("optim_wrapper") or {}).get("optimizer") or {}
    kind = optimizer.get("type")
    of_mmengine = config.get("default_scope") in (None, "mmengine")
    if of_mmengine and isinstance(kind, str) and "." not in kind and OPTIMIZERS.get(kind) is None:
        known = nearest(kind, OPTIMIZERS.module_dict)
        raise ValueError(f"optim_wrapper: optimizer type {kind!r} is unknown.{known}")
    source = config.get("load_from")
    if source and "://" not in str(source) and not Path(source).expanduser().is_file():
        raise FileNotFoundError(
            f"checkpoint {str(source)!r} (load_from or --resume) does not exist or is no file."
        )


def read_sparsity(config: Mapping[str, Any]) -> tuple[Strategy | None, dict[str, Any]]:
    """A config's strategy (None: dense), and the other arguments of its `fst.convert`.

    Raises:
        ValueError: an unknown key, strategy or value in the config's ``sparsity``.
    """
    sparsity = config.get("sparsity")
    if sparsity is None:
        return None, {}
    if not isinstance(sparsity, Mapping) or "strategy" not in sparsity:
        raise ValueError(f"sparsity={sparsity!r} must be a dict with the key 'strategy'.")
    if "type" in sparsity:
        raise ValueError("sparsity takes the arguments of SparsityHook, but no 'type'.")
    hook = SparsityHook(**sparsity)
    return hook.strategy, hook.choice


def _datasets(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """A dataset's config, and those within wrappers such as mmengine's RepeatDataset."""
    if isinstance(dataset, Mapping):
        yield dataset
        yield from _datasets(dataset.get("dataset"))
        for part in dataset.get("datasets", ()):
            yield from _datasets(part)


def _check_dataset(dataset: Mapping[str, Any], where: str, scope: str) -> None:
    kind = dataset.get("type")
    if isinstance(kind, str):
        found = DATASETS.get(kind)
        if found is None and "." not in kind and scope == "mmengine":
            known = DATASETS.module_dict
            raise ValueError(f"{where}: dataset type {kind!r} is unknown.{suggest(kind, known)}")
        kind = found
    if isinstance(kind, type) and issubclass(kind, ImageDataset | TimmStream):
        arguments = {key: value for key, value in dataset.items() if key not in ("type", "_scope_")}
        check_keys(f"{where}: {kind.__name__}", kind, arguments)
        kind.check(**arguments)
        return
    root = dataset.get("data_root")
    if root and "://" not in str(root) and not Path(root).expanduser().is_dir():
        raise FileNotFoundError(
            f"{where}: data_root={str(root)!r} does not exist; get the data of "
            f"{dataset.get('type')} and put or link it there, or change data_root."
        )
