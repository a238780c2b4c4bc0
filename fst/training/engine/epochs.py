"""The number of epochs of a config, with the schedules that end there."""

from __future__ import annotations

from collections.abc import Mapping

from mmengine.config import Config

from fst.basics.values import check_integer


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
