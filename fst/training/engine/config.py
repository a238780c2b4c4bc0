"""Configs as a training runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.config import Config

from fst.basics.values import check_integer
from fst.rules.strategy import Strategy
from fst.training.configs import is_detector, known_keys, read_config
from fst.training.engine import data_root
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


def set_epochs(config: Config, epochs: int) -> None:
    """Shorten or stretch a training: schedules that last to its end last to the new end.

    Raises:
        ValueError: the loop counts no epochs, or a schedule that ends earlier, such as a warm-up,
            does not fit into the new number.
    """
    check_integer("epochs", epochs, 1)
    last = (config.get("train_cfg") or {}).get("max_epochs")
    if last is None:
        raise ValueError(f"epochs={epochs} needs a train_cfg that has max_epochs.")
    schedulers = config.get("param_scheduler") or []
    if isinstance(schedulers, Mapping):
        schedulers = [schedulers] if "type" in schedulers else []  # else one list per optimizer
    for scheduler in schedulers:
        if not scheduler.get("by_epoch", True):
            continue
        begin, lasts = scheduler.get("begin", 0), scheduler.get("end", last) == last
        ends = [0] if lasts else [scheduler["end"]]
        if (longest := max([begin, *ends, *scheduler.get("milestones", [])])) >= epochs:
            raise ValueError(
                f"epochs={epochs} must be at least {longest + 1}, or param_scheduler another one: "
                f"{dict(scheduler)}."
            )
        if lasts:
            new = {"end": epochs, "T_max": epochs - begin}
            scheduler.update({key: new[key] for key in new.keys() & scheduler.keys()})
    config.train_cfg.max_epochs = epochs


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
