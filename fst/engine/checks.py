"""What of a config would be ignored or fail later is refused before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.registry import DATASETS, OPTIMIZERS

from fst.basics.text import nearest, suggest
from fst.basics.values import is_integer
from fst.engine.config import read_sparsity
from fst.engine.data import ImageDataset, TimmStream
from fst.engine.data.loader import check_loader_keys
from fst.engine.hooks import ModelEMAHook
from fst.engine.metrics import Accuracy
from fst.engine.recipe import check_keys

# what mmengine asks a config for by name: it ignores any other
ENV_CFG = ("cudnn_benchmark", "mp_cfg", "dist_cfg", "resource_limit")
AUTO_SCALE_LR = ("enable", "base_batch_size")
PARAMWISE_CFG = (
    "custom_keys",
    "bias_lr_mult",
    "bias_decay_mult",
    "norm_decay_mult",
    "dwconv_decay_mult",
    "flat_decay_mult",
    "bypass_duplicate",
    "dcn_offset_lr_mult",
)
_CONSTRUCTOR = "DefaultOptimWrapperConstructor"
_CUSTOM_KEY = ("lr_mult", "decay_mult")  # beside the optimizer's own arguments
_OF_ANY_HOOK = {"priority", "_scope_"}


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
            check_loader_keys(name, config[name])
            for dataset in _datasets(config[name].get("dataset")):
                _check_dataset(dataset, name, config.get("default_scope") or "mmengine")
    if config.get("default_scope") == "mmdet":
        from fst.detection.config import check_files

        check_files(config, dataloaders)
    _check_names("env_cfg", config.get("env_cfg"), ENV_CFG)
    _check_names("auto_scale_lr", config.get("auto_scale_lr"), AUTO_SCALE_LR)
    _check_optimizer(config)
    evaluators = [name.replace("dataloader", "evaluator") for name in dataloaders]
    metrics = {name: _check_accuracy(config, name) for name in evaluators}
    saving = (config.get("default_hooks") or {}).get("checkpoint") or {}
    _check_saving(saving, metrics.get("val_evaluator"))
    source = config.get("load_from")
    if source and "://" not in str(source) and not Path(source).expanduser().is_file():
        raise FileNotFoundError(
            f"checkpoint {str(source)!r} (load_from or --resume) does not exist or is no file."
        )


def _check_names(where: str, given: Collection[str] | None, known: Collection[str]) -> None:
    for name in given or ():
        if name not in known:
            raise ValueError(f"{where} key {name!r} is unknown.{suggest(name, known)}")


def _check_optimizer(config: Config) -> None:
    """The type, its arguments and `paramwise_cfg`; other constructors have keys of their own."""
    wrapper = config.get("optim_wrapper") or {}
    optimizer = dict(wrapper.get("optimizer") or {})
    kind = optimizer.pop("type", None)
    if isinstance(kind, str):
        found = OPTIMIZERS.get(kind)
        of_mmengine = config.get("default_scope") in (None, "mmengine")
        if found is None and of_mmengine and "." not in kind:
            known = nearest(kind, OPTIMIZERS.module_dict)
            raise ValueError(f"optim_wrapper: optimizer type {kind!r} is unknown.{known}")
        kind = found
    if wrapper.get("constructor", _CONSTRUCTOR) != _CONSTRUCTOR:
        return
    choice = wrapper.get("paramwise_cfg") or {}
    _check_names("optim_wrapper.paramwise_cfg", choice, PARAMWISE_CFG)
    parameters = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name != "params"]
    _check_names("optim_wrapper.optimizer", optimizer.keys() - {"_scope_"}, known)
    for pattern, changes in (choice.get("custom_keys") or {}).items():
        where = f"optim_wrapper.paramwise_cfg.custom_keys[{pattern!r}]"
        _check_names(where, changes, (*_CUSTOM_KEY, *known))


def _check_accuracy(config: Config, name: str) -> list[str] | None:
    """The metrics of an evaluator of `Accuracy` alone; None if others measure too."""
    evaluators = config.get(name) or []
    evaluators = evaluators if isinstance(evaluators, list | tuple) else [evaluators]
    metrics: list[str] = []
    is_accuracy = bool(evaluators)
    for evaluator in evaluators:
        if not isinstance(evaluator, Mapping) or evaluator.get("type") != "Accuracy":
            is_accuracy = False
            continue
        arguments = {key: evaluator[key] for key in evaluator if key not in ("type", "_scope_")}
        check_keys(f"{name}: Accuracy", Accuracy, arguments)
        accuracy = Accuracy(**arguments)
        architecture = config.model.get("architecture")
        classes = architecture.get("num_classes") if isinstance(architecture, Mapping) else None
        if isinstance(classes, int) and max(accuracy.topk) > classes:
            raise ValueError(
                f"{name}: topk={accuracy.topk} exceeds the model's num_classes={classes}."
            )
        metrics += accuracy.names
    return metrics if is_accuracy else None


def _check_saving(saving: Mapping[str, Any], metrics: Collection[str] | None) -> None:
    if saving.get("type") not in ("CheckpointHook", "CrashSafeCheckpointHook"):
        return
    where = "default_hooks.checkpoint"
    check_keys(where, CheckpointHook, saving.keys() - _OF_ANY_HOOK - {"type"})
    interval = saving.get("interval", -1)
    if not is_integer(interval) or interval < -1 or not interval:
        raise ValueError(
            f"{where}.interval={interval!r} must be a whole number, at least 1, or -1 (save at the "
            "end alone)."
        )
    best = saving.get("save_best") or []
    for metric in [best] if isinstance(best, str) else best:
        if metrics is not None and metric not in ("auto", *metrics):
            raise ValueError(
                f"{where}.save_best={metric!r} is no metric.{suggest(metric, metrics)}"
            )


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
