"""The number of epochs of a config, and the schedules that it has to agree with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config

from fst.basics.values import check_integer


def set_epochs(config: Config, epochs: int) -> None:
    """Shorten or stretch a training: schedules that last to its end last to the new end.

    Raises:
        ValueError: the loop counts no epochs, or a schedule that ends earlier, such as a warm-up,
            does not fit into the new number.
    """
    check_integer("epochs", epochs, 1)
    if _epochs(config) is None:
        raise ValueError(f"epochs={epochs} needs a train_cfg that has max_epochs.")
    last = _schedules_end(config)
    for scheduler in _by_epochs(config):
        begin, lasts = scheduler.get("begin", 0), scheduler.get("end", last) == last
        ends = [0] if lasts else [scheduler["end"]]
        if max([begin, *ends, *scheduler.get("milestones", [])]) >= epochs:
            raise ValueError(
                f"epochs={epochs} is too few: {dict(scheduler)} lasts longer; "
                "change param_scheduler too."
            )
        if lasts:
            new = {"end": epochs, "T_max": epochs - begin}
            scheduler.update({key: new[key] for key in new.keys() & scheduler.keys()})
    config.train_cfg.max_epochs = epochs


def schedule_mismatch(config: Config) -> str:
    """The sentence that schedules end at another epoch than the training; empty if they do not."""
    epochs = _epochs(config)
    if epochs is None or (end := _schedules_end(config)) == epochs:
        return ""
    return (
        f"train_cfg.max_epochs={epochs}, but param_scheduler ends at epoch {end}: "
        f"--epochs {epochs} sets both."
    )


def _epochs(config: Config) -> int | None:
    return (config.get("train_cfg") or {}).get("max_epochs")


def _schedules_end(config: Config) -> int:
    """The epoch to which the schedules last; that of the training where they are warm-ups alone."""
    epochs, ends = _epochs(config), []
    for scheduler in _by_epochs(config):
        begin, end = scheduler.get("begin", 0), scheduler.get("end")
        if "T_max" in scheduler and end is None:
            end = begin + scheduler["T_max"]
        ends.append((end or 0, "T_max" in scheduler or begin > 0))
        ends += [(milestone + 1, False) for milestone in scheduler.get("milestones", [])]
    end, anneals = max(ends, default=(0, False))
    return end if anneals or end > epochs else epochs


def _by_epochs(config: Config) -> Iterator[Any]:
    """The schedulers that count epochs; those of several optimizers are left out."""
    schedulers = config.get("param_scheduler") or []
    if isinstance(schedulers, Mapping):
        schedulers = [schedulers] if "type" in schedulers else []
    for scheduler in schedulers:
        if isinstance(scheduler, Mapping) and scheduler.get("by_epoch", True):
            yield scheduler
