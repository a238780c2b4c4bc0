"""Checkpoint files: reading never runs code from the file, writing never leaves half a file."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PREFIX, SUFFIX = ".fst-", ".unfinished"  # of the folders in which files are written
PROGRAMS = (".pt2", ".onnx")
ZIP_START = b"PK\3\4"
CHUNK = 1 << 20
LEAST_FREE = 1 << 16  # bytes of a disk that is not full
NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"} | {
    f"{kind}{size}": code.upper() if kind == "u" else code
    for kind in "iu"
    for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
}  # kinds of NumPy's scalars, as `struct` writes them


class _Discarded:
    """Takes the place of what is read past and never built, such as log curves."""

    def __new__(cls, *_: object) -> _Discarded:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """Forget the arguments."""

    def __setstate__(self, state: object) -> None:
        """Forget the state."""


class _Kind(_Discarded):
    """Takes the place of `numpy.dtype`."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name: Any = name
        self.order = "<"

    def __setstate__(self, state: object) -> None:
        """Remember the order of bytes alone."""
        self.order = ">" if isinstance(state, tuple) and state[1:2] == (">",) else "<"

    @property
    def is_number(self) -> bool:
        """True if its values are numbers, not pointers or text."""
        return isinstance(self.name, str) and self.name in NUMBERS


class _Array(_Discarded):
    """Takes the place of `numpy.ndarray`; `numpy.asarray` makes one of it, if it holds numbers."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state as it is."""
        self.state = state

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        _, shape, kind, is_fortran, content = self.state
        if not kind.is_number:
            raise ValueError(f"an array of kind {kind.name!r} in a checkpoint holds no numbers.")
        values = np.frombuffer(content, kind.order + kind.name)
        return values.reshape(shape, order="F" if is_fortran else "C").astype(dtype or values.dtype)


def _number(kind: object = None, content: object = b"", *_: object) -> object:
    """Takes the place of NumPy's scalars: a Python number."""
    if not isinstance(kind, _Kind) or not kind.is_number or not isinstance(content, bytes):
        return _Discarded()
    return struct.unpack(kind.order + NUMBERS[kind.name], content)[0]


def _discarded_call(*_: object) -> None:
    """Takes the place of `getattr`, by which log curves name their statistics functions."""


_ALLOWED: list[Any] = [  # what a file may name besides tensors and plain data
    (_Discarded, "mmengine.logging.history_buffer.HistoryBuffer"),
    (_discarded_call, "builtins.getattr"),
    (_Discarded, "argparse.Namespace"),  # the arguments of timm's and torchvision's scripts
    (_Array, "numpy.ndarray"),
    (_Kind, "numpy.dtype"),
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((_number, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
]


def load_checkpoint_safely(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read a checkpoint of FST, mmengine, timm or torchvision without running code from it.

    Records are bounded by the file's size, and checksums are verified (the files of PyTorch before
    1.6 have none). NumPy's scalars become Python numbers, its arrays what `numpy.asarray` takes.

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
    """Refuse archives that torch.load would read: wrong checksums, records beyond the file's size.

    Raises:
        zipfile.BadZipFile: a checksum is wrong.
        ValueError: compressed records claim more than the file's size.
    """
    with open(path, "rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            return
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise ValueError("its records are larger than the file")
            for record in records:
                record.CRC = record.CRC or None  # type: ignore[assignment]  # torch may write none
                with archive.open(record) as content:
                    while content.read(CHUNK):
                        pass  # the last read raises BadZipFile if the checksum is wrong


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

    It lies in a folder of its own beside ``path``, so writers of one path do not disturb each
    other, and each finds what it has written. Readers see the old file or the whole new one. After
    an exception the old file stays, and nothing else. A link stays a link: what it names is
    replaced. A process that is killed leaves its folder behind, for `discard_unfinished`.

    Raises:
        OSError: ``path`` is a folder or no regular file, or its folder does not exist or cannot be
            written to; before the block begins. Or the disk is full.
    """
    final = Path(os.path.realpath(path))
    if final.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, where a file is to be written", str(path))
    if final.exists() and not final.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        beside = tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, dir=final.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with beside as folder:
        partial = Path(folder) / Path(path).name  # a link names the format
        if final.exists():
            mode = final.stat().st_mode
        else:  # what new files get: some writers choose a mode of their own
            partial.touch()
            mode = partial.stat().st_mode
            partial.unlink()
        try:
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        except Exception as error:  # writers say in many ways that a disk is full
            if _is_full(folder, error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
        os.chmod(partial, stat.S_IMODE(mode))
        os.replace(partial, final)
        directory = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _is_full(folder: str, error: Exception) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or shutil.disk_usage(folder).free < LEAST_FREE


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
