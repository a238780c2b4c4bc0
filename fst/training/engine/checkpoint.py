"""The checkpoints of a run: which is the newest, whether it can go on, where mmengine finds others.

Importing this module replaces mmengine's loaders (through their public registry): those fall back
to an unrestricted unpickler, with a mere warning, when a file needs one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.optim import AmpOptimWrapper
from mmengine.runner import CheckpointLoader, EpochBasedTrainLoop
from mmengine.runner.checkpoint import get_external_models, get_torchvision_models

from fst.basics.values import is_integer
from fst.files.checkpoint import load_checkpoint_safely, replacing, state_dict_of

LOCK = "training.lock"
POINTER = "last_checkpoint"  # the file in which MMEngine names the newest checkpoint


def refuse_no_folder(work_dir: str | os.PathLike[str]) -> None:
    """Raise ValueError unless ``work_dir``, or what of its path exists, is a folder."""
    path = Path(work_dir)
    existing = next(part for part in (path, *path.parents, Path()) if os.path.lexists(part))
    if not existing.is_dir():
        raise ValueError(
            f"work_dir={str(work_dir)!r}: {str(existing)!r} is no folder; name another one with "
            "--work-dir."
        )


def checkpoint_files(work_dir: str | os.PathLike[str]) -> list[tuple[str, int, Path]]:
    """Find epoch_N.pth and iter_N.pth in ``work_dir``: (kind, N, path) of each."""
    return [
        (named[1], int(named[2]), path)
        for path in Path(work_dir).glob("*.pth")
        if (named := re.fullmatch(r"(epoch|iter)_(\d+)\.pth", path.name))
    ]


def newest_checkpoint(work_dir: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in ``work_dir`` that can be read; None if there is none at all.

    The newest is the one that has been trained for most iterations.

    Raises:
        ValueError: there are checkpoints, and none of them can be read.
    """
    broken: list[str] = []
    readable: dict[str, tuple[int, int, str]] = {}  # of each kind
    for kind, step, path in sorted(checkpoint_files(work_dir), reverse=True):
        if kind in readable:
            continue
        try:
            meta = training_position(load_checkpoint_safely(path), path)
            if meta[kind] != step:
                raise ValueError(f"{path} holds {kind} {meta[kind]}, not what its name says.")
        except (ValueError, OSError) as error:
            broken.append(str(error))
        else:
            readable[kind] = (meta["iter"], meta["epoch"], str(path))
    if readable:
        newest = max(readable.values())[-1]
        for message in broken:
            print_log(
                f"Resuming from {newest} instead of a newer file: {message}",
                logger="current",
                level=logging.WARNING,
            )
        return newest
    if broken:
        raise ValueError(f"no checkpoint in {str(work_dir)!r} can be read: {' '.join(broken)}")
    return None


def check_newest(work_dir: str | os.PathLike[str], position: Mapping[str, Any]) -> None:
    """Check that a run that goes on from this position can be resumed later.

    Raises:
        ValueError: the work dir holds a checkpoint of a later step, which would be taken instead.
    """
    for kind, step, path in sorted(checkpoint_files(work_dir), reverse=True):
        if step > position[kind]:
            raise ValueError(
                f"work_dir={str(work_dir)!r} holds {path.name}, and the run would go on from "
                f"{kind} {position[kind]}: a later --resume would take {path.name}. Move it away, "
                "or give the run a --work-dir of its own."
            )


def check_unused(work_dir: str | os.PathLike[str]) -> None:
    """Check that a run may start in ``work_dir``, and later go on from its newest checkpoint.

    Raises:
        ValueError: it holds checkpoints, which would be mistaken for the run's own.
    """
    found = sorted(checkpoint_files(work_dir))
    if found:
        raise ValueError(
            f"work_dir={str(work_dir)!r} holds {found[-1][-1].name} of an earlier run: go on from "
            "it with --resume, or give this run a --work-dir of its own."
        )


def training_position(checkpoint: Any, path: object) -> dict[str, Any]:
    """The "meta" of a training checkpoint, which has "epoch" and "iter".

    Raises:
        ValueError: it holds weights alone, or is no training checkpoint of mmengine.
    """
    state_dict_of(checkpoint, path)
    meta = checkpoint.get("meta")
    if not isinstance(meta, dict):
        raise ValueError(
            f"cannot resume from {str(path)!r}: it holds weights alone, no training state. To "
            "start from them use load_from without resume."
        )
    for key in ("epoch", "iter"):
        value = meta.get(key)
        if not is_integer(value) or value < 0:
            raise ValueError(
                f"cannot resume from {str(path)!r}: its meta[{key!r}] is {value!r}, and must be a "
                "number of trained steps. To start from its weights use load_from without resume."
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
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    if by_epoch:
        epoch, iteration = meta["epoch"], meta["iter"]
        inside = iteration % epoch if epoch else iteration  # files of mmengine do not say
        if inside or not meta.get("by_epoch", True):
            raise ValueError(
                f"{start}it was saved inside an epoch (epoch={epoch}, iter={iteration}), of which "
                "a run by epochs cannot train the rest. Name a checkpoint of the end of an epoch "
                "(CheckpointHook with by_epoch=True), or train by iterations "
                "(train_cfg.by_epoch=False)."
            )
        if iteration != epoch * len(loop.dataloader):
            runner.logger.warning(
                f"The epochs of {str(path)!r} have {iteration // max(epoch, 1)} iterations, those "
                f"of this run {len(loop.dataloader)}: it will differ from an uninterrupted one."
            )
    done, end = ("epoch", "max_epochs") if by_epoch else ("iter", "max_iters")
    if meta[done] > getattr(loop, end):
        raise ValueError(
            f"{start}its {done}={meta[done]} lies beyond the end, {end}={getattr(loop, end)}."
        )
    needed = {"optimizer": "save_optimizer", "message_hub": None}
    if runner.param_schedulers:
        needed["param_schedulers"] = "save_param_scheduler"
    for key, option in needed.items():
        if key not in checkpoint:
            hint = f" (CheckpointHook with {option}=False saves none)" if option else ""
            raise ValueError(
                f"{start}it holds no {key!r}{hint}, so that training would not go on as it was. To "
                "start from its weights use load_from without resume."
            )
    counts = [len(s or ()) for s in (checkpoint.get("param_schedulers"), runner.param_schedulers)]
    if counts[0] != counts[1]:  # MMEngine would take as many as both have
        raise ValueError(
            f"{start}it holds {counts[0]} param_schedulers, and the run has {counts[1]}."
        )
    precision, own_precision = meta.get("precision"), precision_of(runner.optim_wrapper)
    if precision not in (None, own_precision):
        raise ValueError(
            f"{start}it was trained in {precision}, and this run is in {own_precision}: give the "
            "same optim_wrapper (--amp is bfloat16), or start from its weights with load_from and "
            "without resume."
        )
    saved = meta.get("restored_settings") or {}
    own = restored_settings(runner.cfg)
    for key in own:
        if saved.get(key, own[key]) != own[key]:
            raise ValueError(
                f"{start}its {key} is {saved[key]}, and this run's {own[key]} would be ignored. "
                "Undo that change, or start from its weights with load_from and without resume."
            )


def precision_of(optimizer: Any) -> str:
    """The dtype of the products that a training's optimizer wrapper asks for, in words."""
    if not isinstance(optimizer, AmpOptimWrapper):
        return "float32"
    return str(optimizer.cast_dtype or torch.float16).removeprefix("torch.")


def restored_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings that a resumed run takes from its checkpoint, whatever its config says."""
    wrapper = config.get("optim_wrapper") or {}
    settings = {f"optim_wrapper.{key}": wrapper.get(key) for key in ("optimizer", "paramwise_cfg")}
    settings["param_scheduler"] = schedulers = config.get("param_scheduler") or []
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


@contextmanager
def sole_run(work_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other runs out of a folder, as long as this process lives and the body runs.

    Raises:
        ValueError: another process trains there.
    """
    # lockf, not flock: data loading workers, which may outlive a killed run, do not inherit it
    with open(Path(work_dir) / LOCK, "w", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise ValueError(
                f"work_dir={str(work_dir)!r}: another process is training there. Wait for its end, "
                "or give this run a --work-dir of its own."
            ) from error
        yield


def _from_url(url: str, map_location: Any = None, **_: Any) -> Any:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        with replacing(path) as partial:
            torch.hub.download_url_to_file(url, str(partial), progress=os.isatty(0))
    return load_checkpoint_safely(path, map_location)


def _from_local(filename: str, map_location: Any = None) -> Any:
    return load_checkpoint_safely(filename, map_location)


def _from_hub(filename: str, map_location: Any = None) -> Any:
    scheme, _, name = filename.partition("://")
    models = get_external_models() if "mmlab" in scheme else get_torchvision_models()
    if name not in models:
        raise ValueError(f"{filename!r} names no checkpoint that MMEngine knows.")
    return _from_url(models[name], map_location)


def _refused(filename: str, map_location: Any = None) -> Any:
    raise ValueError(
        f"checkpoint {filename!r}: this storage is not supported; copy the file to a local path."
    )


for _prefixes, _loader in {
    "": _from_local,
    ("http://", "https://"): _from_url,
    ("modelzoo://", "torchvision://", "open-mmlab://", "openmmlab://"): _from_hub,
    (r"(\S+\:)?s3://", r"(\S+\:)?petrel://", "pavi://", "mmcls://"): _refused,
}.items():
    CheckpointLoader.register_scheme(_prefixes, _loader, force=True)
