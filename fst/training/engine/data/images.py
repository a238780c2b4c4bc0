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
ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xae\x42\x60\x82", "GIF": b";"}
TAIL = 64  # bytes of a file in which its end is looked for, but for padding
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


def check_whole(path: str, kind: str | None) -> None:
    """Raise what Pillow raises where a file of that format stops before its image does.

    Only where the file does not show its end, as BMP and TIFF do not, the image is decoded.
    """
    if kind == "WEBP":  # whose length was compared when it was opened
        return
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL))
        end = file.read().rstrip(b"\0\r\n ")
    if kind not in ENDS or not end.endswith(ENDS[kind]):
        with Image.open(path) as image:
            image.load()


def faults(paths: Sequence[str], what: str) -> dict[str, str]:
    """Of the images that cannot be read the reasons, by path; ``what`` names progress.

    Headers and ends of the files tell it; damage between them is seen in PNG alone.
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
            check_whole(path, kind)
    except ValueError as error:
        return str(error)
    return ""


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
