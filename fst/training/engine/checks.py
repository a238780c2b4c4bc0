"""Refuse, before a training, what MMEngine would ignore without a word."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS, OPTIMIZERS

from fst.basics.text import nearest
from fst.basics.values import refuse_unknown
from fst.training.engine.data.base import ImageDataset
from fst.training.engine.data.loader import is_own
from fst.training.engine.data_root import datasets_of

# The keys that MMEngine looks up by name: it ignores all others.
READ = {
    "env_cfg": "cudnn_benchmark mp_cfg dist_cfg resource_limit".split(),
    "auto_scale_lr": ["enable", "base_batch_size"],
}
PARAMWISE_CFG = """custom_keys bias_lr_mult bias_decay_mult norm_decay_mult dwconv_decay_mult
    flat_decay_mult bypass_duplicate dcn_offset_lr_mult""".split()
CUSTOM_KEY = ("lr_mult", "decay_mult")  # and the optimizer's own settings
_CONSTRUCTOR = "DefaultOptimWrapperConstructor"


def check_config(config: Config, dataloaders: Sequence[str]) -> None:
    """Check what can be checked without building anything: ignored keys, files.

    Args:
        config: The whole config.
        dataloaders: Which of its dataloaders are going to be used.

    Raises:
        FileNotFoundError: the folder of a data set, its images, or a checkpoint do not exist.
        ValueError: anything else.
    """
    if config.get("model") is None:
        raise ValueError(f"config {config.filename!r} has no `model`.")
    for key, known in READ.items():
        refuse_unknown(key, config.get(key), known)
    wrapper = config.get("optim_wrapper") or {}
    if wrapper.get("constructor", _CONSTRUCTOR) == _CONSTRUCTOR:  # others have keys of their own
        _check_paramwise(wrapper)
    for name in dataloaders:
        _check_loader(name, config)
    for kind, dataset in _own_datasets(config, dataloaders):
        kind.check(**{key: dataset[key] for key in dataset if key != "type"})
    source = config.get("load_from")
    if source and "://" not in str(source) and not Path(source).expanduser().is_file():
        raise FileNotFoundError(
            f"checkpoint {str(source)!r} (load_from or --resume) does not exist or is no file."
        )


def _own_datasets(
    config: Config, dataloaders: Sequence[str]
) -> Iterator[tuple[type[ImageDataset], Any]]:
    """The configs of FST's own data sets, wrapped or not, each with its class."""
    for name, datasets in datasets_of(config).items():
        for dataset in datasets if name in dataloaders else ():
            if is_own(dataset):
                kind = dataset["type"]
                yield DATASETS.get(kind) if isinstance(kind, str) else kind, dataset


def _check_loader(name: str, config: Config) -> None:
    loader = config.get(name) or {}
    own = is_own(loader.get("dataset"))
    for kind, _ in _own_datasets(config, [] if own else [name]):
        raise ValueError(
            f"{name}: dataset type {loader['dataset']['type']!r} cannot wrap {kind.__name__}, "
            "which makes batches itself."
        )
    if own and name == "train_dataloader" and loader.get("sampler") is None:
        raise ValueError(
            "train_dataloader has no sampler: images would come in the order of their files. Set "
            "sampler=dict(type='DefaultSampler', shuffle=True)."
        )


def _check_paramwise(wrapper: Any) -> None:
    where, choice = "optim_wrapper.paramwise_cfg", wrapper.get("paramwise_cfg") or {}
    refuse_unknown(where, choice, PARAMWISE_CFG)
    name = (wrapper.get("optimizer") or {}).get("type")
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else name
    if name is not None and kind is None:  # MMEngine's error does not name it
        near = nearest(name, OPTIMIZERS.module_dict)
        raise ValueError(f"optim_wrapper: optimizer type {name!r} is unknown.{near}")
    settings = inspect.signature(kind).parameters if kind else {}
    if any(setting.kind is setting.VAR_KEYWORD for setting in settings.values()):
        return
    for pattern, changes in (choice.get("custom_keys") or {}).items():
        refuse_unknown(f"{where}.custom_keys[{pattern!r}]", changes, (*CUSTOM_KEY, *settings))
