"""Checkpoint files: reading never runs code from the file, writing never leaves half a file."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

CORES = ("_core", "core")  # of numpy: 2 and 1 name it differently


class _DiscardedLogHistory:
    """Takes the place of mmengine's HistoryBuffer: log curves are read past, never rebuilt."""


def _discarded_attribute(*_: object) -> None:
    """Takes the place of `getattr`, by which those curves name their statistics functions."""


@functools.cache
def _allowed() -> list[Any]:
    """What a file may name besides tensors and plain data."""
    placeholders: list[Any] = [
        (_DiscardedLogHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
        (_discarded_attribute, "builtins.getattr"),
    ]
    if importlib.util.find_spec("numpy") is None:
        return placeholders
    import numpy as np

    array = np._core.multiarray
    kinds = ("float32", "float64", "int32", "int64", "uint8", "uint32")
    return [
        *placeholders,
        np.ndarray,
        np.dtype,
        *((array._reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in CORES),
        *((array.scalar, f"numpy.{core}.multiarray.scalar") for core in CORES),
        *(type(np.dtype(kind)) for kind in kinds),
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
        with torch.serialization.safe_globals(_allowed()):
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
