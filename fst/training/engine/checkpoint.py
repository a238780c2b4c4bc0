"""The checkpoints of a run: which is the newest, and whether it can go on.

Importing this module lets mmengine's loaders read by `load_checkpoint_safely`: on their own they
fall back to an unrestricted unpickler, with a mere warning, when a file needs one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mmengine.runner.checkpoint
import torch
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop

from fst.basics.values import is_integer
from fst.files.checkpoint import load_checkpoint_safely, state_dict_of


def checkpoint_files(work_dir: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Find epoch_N.pth and iter_N.pth in ``work_dir``: (N, path) of each, ascending."""
    return sorted(
        (int(named[1]), path)
        for path in Path(work_dir).glob("*.pth")
        if (named := re.fullmatch(r"(?:epoch|iter)_(\d+)\.pth", path.name))
    )


def newest_checkpoint(work_dir: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in ``work_dir`` that can be read; None if there is none at all.

    Raises:
        ValueError: there are checkpoints, and none of them can be read.
    """
    broken: list[str] = []
    for _, path in reversed(checkpoint_files(work_dir)):
        try:
            training_position(load_checkpoint_safely(path), path)
        except (ValueError, OSError) as error:
            broken.append(str(error))
            continue
        for message in broken:
            message = f"Resuming from {path} instead of a newer file: {message}"
            print_log(message, logger="current", level=logging.WARNING)
        return str(path)
    if broken:
        raise ValueError(f"no checkpoint in {str(work_dir)!r} can be read: {' '.join(broken)}")
    return None


def check_unused(
    work_dir: str | os.PathLike[str], position: Mapping[str, int] | None = None
) -> None:
    """Check that a run may start in ``work_dir``, and later go on from its newest checkpoint.

    Args:
        work_dir: The folder.
        position: "epoch" and "iter" from which the run goes on; without them from the start.

    Raises:
        ValueError: it holds checkpoints of later ones, which would be mistaken for the run's own.
    """
    for step, path in reversed(checkpoint_files(work_dir)):
        if step > (position or {}).get(path.name.partition("_")[0], 0):
            raise ValueError(
                f"work_dir={str(work_dir)!r} holds {path.name} of an earlier run: go on from it "
                "with --resume, move it away, or give this run a --work-dir of its own."
            )


def training_position(checkpoint: Any, path: object) -> dict[str, Any]:
    """The "meta" of a training checkpoint, which has "epoch" and "iter".

    Raises:
        ValueError: it holds weights alone, or is no training checkpoint of mmengine.
    """
    state_dict_of(checkpoint, path)
    meta = checkpoint.get("meta")
    if not isinstance(meta, dict) or not all(is_integer(meta.get(k)) for k in ("epoch", "iter")):
        raise ValueError(
            f"cannot resume from {str(path)!r}: it holds weights alone, and no meta with epoch and "
            "iter. To start from them use load_from without resume."
        )
    return meta


def check_resumable(checkpoint: Any, path: object, runner: Any) -> None:
    """Check that ``runner`` can go on exactly from a checkpoint.

    Args:
        checkpoint: What was read from ``path``.
        path: For messages.
        runner: Its loop, optimizer and schedulers are built.

    Raises:
        ValueError: it cannot; the message says why, and what can be done.
    """
    meta, loop = training_position(checkpoint, path), runner.train_loop
    start = f"cannot resume from {str(path)!r}: "
    end = "To start from its weights use load_from without resume."
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    if by_epoch:
        epoch, iteration = meta["epoch"], meta["iter"]
        inside = iteration % epoch if epoch else iteration  # files of mmengine do not say
        if inside or not meta.get("by_epoch", True):
            raise ValueError(
                f"{start}it was saved inside an epoch (epoch={epoch}, iter={iteration}), whose "
                "rest a run by epochs cannot train. Name a checkpoint of the end of an epoch."
            )
        if iteration != epoch * len(loop.dataloader):
            runner.logger.warning(
                f"The epochs of {str(path)!r} have {iteration // max(epoch, 1)} iterations, those "
                f"of this run {len(loop.dataloader)}: it will differ from an uninterrupted one."
            )
    done, most = ("epoch", loop.max_epochs) if by_epoch else ("iter", loop.max_iters)
    if meta[done] > most:
        raise ValueError(f"{start}its {done}={meta[done]} lies beyond the end, {most}.")
    for key in ("optimizer", "message_hub", *["param_schedulers"] * bool(runner.param_schedulers)):
        if key not in checkpoint:
            raise ValueError(f"{start}it holds no {key!r}. {end}")
    own = restored_settings(runner.cfg)
    for key, saved in (meta.get("restored_settings") or {}).items():
        if own.get(key, saved) != saved:
            raise ValueError(
                f"{start}its {key} is {saved}, and this run's {own[key]} would be ignored. Undo "
                f"that change. {end}"
            )


def restored_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a training that a resumed run must have too, or would not get."""
    settings = {key: config.get(key) for key in ("optim_wrapper", "param_scheduler")}
    schedulers = settings["param_scheduler"] or []
    if any("end" not in s for s in ([schedulers] if "type" in schedulers else schedulers)):
        settings["train_cfg"] = config.get("train_cfg")  # whose length is their end
    return {key: json.dumps(value, default=str, sort_keys=True) for key, value in settings.items()}


def check_sparsity(checkpoint: Any, path: object, is_sparse: bool) -> None:
    """Check that weights are evaluated as they were trained.

    Args:
        checkpoint: What was read from ``path``; weights alone, as `fst fold` writes them, pass.
        path: For messages.
        is_sparse: Whether the config has a ``sparsity``.

    Raises:
        ValueError: one of the two is sparse, and the other dense.
    """
    if not isinstance(checkpoint, dict):
        return
    if "sparsity" in checkpoint and not is_sparse:
        raise ValueError(
            f"{str(path)!r} comes from a sparse training, but the config has no `sparsity`."
        )
    if is_sparse and "meta" in checkpoint and "sparsity" not in checkpoint:
        raise ValueError(
            f"{str(path)!r} comes from a dense training, but the config has `sparsity`, which "
            "would prune it: --cfg-options sparsity=None takes it as it was trained."
        )


def _from_address(url: str, map_location: Any = "cpu", **_: Any) -> Any:
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        torch.hub.download_url_to_file(url, str(path), progress=os.isatty(0))
    return load_checkpoint_safely(path, map_location)


mmengine.runner.checkpoint._safe_torch_load = load_checkpoint_safely
mmengine.runner.checkpoint.load_url = _from_address
