"""Checkpoint files: reading never runs code from the file, writing never leaves half a file.

Importing this module replaces mmengine's loaders (through their public registry): those fall back
to an unrestricted unpickler, with a mere warning, when a file needs one.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import get_external_models, get_torchvision_models


class _DiscardedLogHistory:
    """Takes the place of mmengine's HistoryBuffer: log curves are read past, never rebuilt."""


def _discarded_attribute(*_: object) -> None:
    """Takes the place of `getattr`, by which those curves name their statistics functions."""


_ALLOWED = [
    (_DiscardedLogHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
    (_discarded_attribute, "builtins.getattr"),
    np.ndarray,
    np.dtype,
    (np._core.multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
    (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    (np._core.multiarray.scalar, "numpy._core.multiarray.scalar"),
    (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"),
    *(type(np.dtype(kind)) for kind in ("float32", "float64", "int32", "int64", "uint8", "uint32")),
]


def load_checkpoint_safely(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Reads a checkpoint of FST, mmengine, timm or torchvision without running code from it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, or needs more than tensors and plain Python data.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {str(path)!r} does not exist")
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it refers to {blocked[1]!r}" if blocked else "it is not a torch checkpoint"
        raise ValueError(
            f"checkpoint {str(path)!r} was not loaded: {reason}, and only tensors and plain "
            "Python data are read, so that no code from the file can run"
        ) from error
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"checkpoint {str(path)!r} is corrupt or not a torch checkpoint: "
            f"{type(error).__name__}: {first_line}"
        ) from error


def state_dict_of(checkpoint: Any, path: object = "the checkpoint") -> dict[str, torch.Tensor]:
    """The weights in a checkpoint: its "state_dict" or "model" entry, or the mapping itself."""
    found = checkpoint
    for key in ("state_dict", "model"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            found = checkpoint[key]
            break
    if not isinstance(found, dict) or not any(torch.is_tensor(v) for v in found.values()):
        raise ValueError(f"{path} holds no weights: neither a state_dict nor a dict with one")
    return {re.sub(r"^module\.", "", k): v for k, v in found.items() if torch.is_tensor(v)}


def commit_file(partial: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Makes a completely written file durable and gives it its final name in one step."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)
    directory = os.open(os.path.dirname(os.path.abspath(final)), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save_atomically(obj: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` that leaves either the old file or the complete new one."""
    partial = f"{os.fspath(path)}.tmp"
    torch.save(obj, partial)
    commit_file(partial, path)


def write_text_atomically(text: str, path: str | os.PathLike[str]) -> None:
    """Replaces a small text file in one step."""
    partial = f"{os.fspath(path)}.tmp"
    Path(partial).write_text(text)
    commit_file(partial, path)


def newest_checkpoint(work_dir: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in `work_dir` that can be read; None if there is none at all.

    Raises:
        ValueError: there are checkpoints, and none of them can be read.
    """
    found = [*Path(work_dir).glob("epoch_*.pth"), *Path(work_dir).glob("iter_*.pth")]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    broken = []
    for path in found:
        try:
            checkpoint = load_checkpoint_safely(path)
            state_dict_of(checkpoint, path)
            if "meta" not in checkpoint:
                raise ValueError(f"{path} holds weights alone, no training state")
        except ValueError as error:
            broken.append(str(error))
            continue
        for message in broken:
            print_log(
                f"Resuming from {path} instead of a newer file: {message}",
                logger="current",
                level=logging.WARNING,
            )
        return str(path)
    if broken:
        raise ValueError(f"no checkpoint in {str(work_dir)!r} can be read: {'; '.join(broken)}")
    return None


def _from_url(url: str, map_location: Any = None, **_: Any) -> Any:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        partial = f"{path}.{os.getpid()}.tmp"
        torch.hub.download_url_to_file(url, partial, progress=os.isatty(0))
        commit_file(partial, path)
    return load_checkpoint_safely(path, map_location)


def _from_local(filename: str, map_location: Any = None) -> Any:
    return load_checkpoint_safely(filename, map_location)


def _from_torchvision(filename: str, map_location: Any = None) -> Any:
    return _from_url(get_torchvision_models()[filename.partition("://")[2]], map_location)


def _from_openmmlab(filename: str, map_location: Any = None) -> Any:
    name = filename.partition("://")[2]
    models = get_external_models()
    if name not in models:
        raise ValueError(f"{filename!r} names no OpenMMLab checkpoint")
    return _from_url(models[name], map_location)


def _refused(filename: str, map_location: Any = None) -> Any:
    raise ValueError(
        f"checkpoint {filename!r}: this storage is not supported; copy the file to a local path"
    )


for _prefixes, _loader in {
    "": _from_local,
    ("http://", "https://"): _from_url,
    ("modelzoo://", "torchvision://"): _from_torchvision,
    ("open-mmlab://", "openmmlab://"): _from_openmmlab,
    (r"(\S+\:)?s3://", r"(\S+\:)?petrel://", "pavi://", "mmcls://"): _refused,
}.items():
    CheckpointLoader.register_scheme(_prefixes, _loader, force=True)
