"""Configs as a training runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.config import Config

from fst.rules.strategy import Strategy
from fst.training.configs import is_detector, known_keys, read_config
from fst.training.engine import data_root
from fst.training.engine.epochs import set_epochs
from fst.training.engine.hooks.sparsity import SparsityHook


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
        FileNotFoundError, ImportError, ValueError: see `read_config`; or the config cannot be run.
    """
    options = dict(options or {})
    epochs = options.pop("epochs", None)
    config = read_config(path, options)
    if epochs is not None:
        set_epochs(config, epochs)
    if is_detector(config):
        from fst.training.detection.config import prepare
    else:
        prepare = data_root.prepare
    counted = {"data_root", "classes"} & config.keys()
    trained = data_root.classes_of_checkpoint(checkpoint) if counted else []
    prepare(config, data_root.datasets_of(config), trained, options)
    for helper in set(config) - known_keys(config):
        config.pop(helper)  # used by now; in the copy in the work dir it would be refused
    return config


def sparsity_hook(config: Mapping[str, Any]) -> SparsityHook | None:
    """The hook of a config's ``sparsity``; None if it has none.

    Raises:
        ValueError: an unknown key, strategy or value.
    """
    sparsity = config.get("sparsity")
    if sparsity is None:
        return None
    if not isinstance(sparsity, Mapping) or "strategy" not in sparsity or "type" in sparsity:
        raise ValueError(
            f"sparsity={sparsity!r} must be a dict with the key 'strategy' and other arguments of "
            "SparsityHook, without 'type'."
        )
    return SparsityHook(**sparsity)


def read_sparsity(config: Mapping[str, Any]) -> tuple[Strategy | None, dict[str, Any]]:
    """A config's strategy (None: dense), and the other arguments of its `fst.convert`.

    Raises:
        ValueError: an unknown key, strategy or value in the config's ``sparsity``.
    """
    hook = sparsity_hook(config)
    return (None, {}) if hook is None else (hook.strategy, hook.choice)
