"""Image files: reading one as 8-bit pixels, and which of many cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track

UNSCALED = ("I", "F")  # modes of 32 bits, whose largest value no file names
CHECKED = ("PNG", "WEBP")  # formats of which the header or a checksum tells that all is there
END = b"\xff\xd9"  # of JPEG
CHUNK = 256  # images of a thread's turn


def opened(path: str) -> Image.Image:
    """The image of a file, with pixels of 8 bits: those of 16 are divided by 257.

    Raises:
        ValueError: it cannot be read, or its mode is one of `UNSCALED`.
    """
    with _named(path), Image.open(path) as file:
        _check_mode(file)
        file.load()
        if not file.mode.startswith("I;16"):
            return file
        wide = np.asarray(file).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))


def faults(paths: Sequence[str], what: str) -> dict[str, str]:
    """Of the images that cannot be read the reasons, by path; ``what`` names progress.

    Of JPEG, PNG and WebP, headers and ends of the files tell it; other formats are decoded.
    """
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with ThreadPool() as pool:
        found = pool.imap(_fault, paths, CHUNK)
        shown = track(found, f"headers of {what}", len(paths), console=console, transient=True)
        return {path: fault for path, fault in zip(paths, shown, strict=True) if fault}


def _fault(path: str) -> str:
    try:
        with _named(path), Image.open(path) as file:
            _check_mode(file)
            kind = file.format
            file.verify()
        if kind not in CHECKED and not (kind in ("JPEG", "MPO") and _tail(path).endswith(END)):
            opened(path)
    except ValueError as error:
        return str(error)
    return ""


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 64))
        return file.read().rstrip(b"\0\r\n ")


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait for ever
            raise ValueError("it is no regular file")
        yield
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"image {path!r} cannot be read: {error}.") from error


def _check_mode(image: Image.Image) -> None:
    if image.mode in UNSCALED:
        raise ValueError(
            f"its mode {image.mode!r} has 32 bits and no known scale; save it with 8 or 16 bits"
        )
