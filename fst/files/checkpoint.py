"""Checkpoint files: reading never runs code from the file, writing never leaves half a file."""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PREFIX, SUFFIX = ".fst-", ".unfinished"  # of the folders in which files are written
PROGRAMS = (".pt2", ".onnx")
LEAST_FREE = 1 << 16  # bytes of a disk that is not full


class _Discarded:
    """Takes the place of what is read past and never built: log curves and NumPy's arrays."""

    def __new__(cls, *_: object) -> _Discarded:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """Forget the arguments."""

    def __setstate__(self, state: object) -> None:
        """Forget the state."""


class _Kind(_Discarded):
    """Takes the place of `numpy.dtype`, whose own state a file could forge to reach memory."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = str(name)


def _number(kind: _Kind, content: bytes) -> object:
    """Takes the place of NumPy's scalars: a Python number."""
    import numpy as np

    return np.frombuffer(content, kind.name).item()


def _discarded_call(*_: object) -> None:
    """Takes the place of `getattr`, by which log curves name their statistics functions."""


_ALLOWED: list[Any] = [  # what a file may name besides tensors and plain data
    argparse.Namespace,  # the arguments of timm's and torchvision's scripts
    (_Discarded, "mmengine.logging.history_buffer.HistoryBuffer"),
    (_discarded_call, "builtins.getattr"),
    (_Discarded, "numpy.ndarray"),
    (_Kind, "numpy.dtype"),
    *((_Discarded, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((_number, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
]


def load_checkpoint_safely(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read a checkpoint of FST, mmengine, timm or torchvision without running code from it.

    Records are bounded by the file's size, and checksums are verified (the files of PyTorch before
    1.6 have none). NumPy's scalars become Python numbers; its arrays are not read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, an exported program, or needs more than tensors and plain
            Python data.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {str(path)!r} does not exist or is no file.")
    if path.suffix in PROGRAMS:
        raise ValueError(f"{str(path)!r} is an exported program, no checkpoint (.pth, .pt).")
    if not path.stat().st_size:
        raise ValueError(f"checkpoint {str(path)!r} is empty.")
    try:
        check_file(path)
        valid = torch.sparse.check_sparse_tensor_invariants(True)
        with torch.serialization.safe_globals(_ALLOWED), valid:
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it refers to {blocked[1]!r}" if blocked else "it is not a torch checkpoint"
        raise ValueError(
            f"checkpoint {str(path)!r} was not loaded: {reason}, and only tensors and plain "
            "Python data are read, so that no code from the file can run."
        ) from error
    except Exception as error:
        first_line = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"checkpoint {str(path)!r} is corrupt or not a torch checkpoint: "
            f"{type(error).__name__}: {first_line}."
        ) from error


def check_file(path: Path) -> None:
    """Refuse archives that torch.load would read.

    Raises:
        ValueError: a record's checksum is wrong, or records claim more than the file's size.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        for record in records:
            record.CRC = record.CRC or None  # type: ignore[assignment]  # torch may write none
        if damaged := archive.testzip():
            raise ValueError(f"the checksum (CRC-32) of its record {damaged!r} is wrong")


def check_sizes(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise ValueError where a tensor claims more bytes than its file has.

    One number can be stored with any shape, and whoever computes with it would need the memory.
    """
    size = path.stat().st_size
    for name, weight in weights.items():
        if weight.numel() * weight.element_size() > size:
            raise ValueError(
                f"{str(path)!r}: the tensor {name!r} of shape {tuple(weight.shape)} is larger "
                f"than the file of {size} bytes."
            )


def state_dict_in(checkpoint: Any) -> Any:
    """The "state_dict" or "model" entry of a checkpoint, or else the checkpoint itself."""
    for key in ("state_dict", "model"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            return checkpoint[key]
    return checkpoint


def state_dict_of(checkpoint: object, path: object = "the checkpoint") -> dict[str, torch.Tensor]:
    """The weights in a checkpoint by name.

    Raises:
        ValueError: it holds none.
    """
    found = state_dict_in(checkpoint)
    if not isinstance(found, dict) or not any(torch.is_tensor(v) for v in found.values()):
        raise ValueError(f"{path} holds no weights: neither a state_dict nor a dict with one.")
    odd = [key for key, v in found.items() if torch.is_tensor(v) and not isinstance(key, str)]
    if odd:
        raise ValueError(f"{path} holds no state_dict: the key {odd[0]!r:.100} is no name.")
    return {re.sub(r"^module\.", "", k): v for k, v in found.items() if torch.is_tensor(v)}


def trained_classes(checkpoint: object) -> list[str]:
    """The names of the classes that a training checkpoint of mmengine saw; empty if it has none."""
    meta = checkpoint.get("meta") if isinstance(checkpoint, dict) else None
    data = meta.get("dataset_meta") if isinstance(meta, dict) else None
    return [str(name) for name in (data or {}).get("classes") or ()]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The file to write in the place of ``path``, which it becomes when the block ends.

    It lies in a folder of its own next to ``path``, so writers of one path do not disturb each
    other. Readers see the old file or the whole new one. After an exception the old file stays, and
    nothing else. What a link names is replaced, not the link. A process that is killed leaves its
    folder behind, for `discard_unfinished`.

    Raises:
        OSError: ``path`` is a folder or no regular file, or its folder does not exist or cannot be
            written to; before the block begins. Or the disk is full.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        raise OSError(errno.EINVAL, "a folder or no regular file", str(path))
    with tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, dir=final.parent) as folder:
        partial = Path(folder, Path(path).name)  # a link names the format
        try:
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        except Exception as error:  # writers say in many ways that a disk is full
            if shutil.disk_usage(folder).free < LEAST_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
        if final.exists():
            shutil.copymode(final, partial)
        os.replace(partial, final)


def discard_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove what killed writers left in ``folder``, in which nobody else may be writing."""
    for left in Path(folder).glob(f"{PREFIX}*{SUFFIX}"):
        shutil.rmtree(left, ignore_errors=True)


def save_atomically(obj: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` that leaves either the old file or the complete new one."""
    with replacing(path) as partial:
        torch.save(obj, partial)


def write_text_atomically(text: str, path: str | os.PathLike[str]) -> None:
    """Replace a small text file in one step."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
