"""Image files, read as 8-bit pixels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image

UNSCALED = ("I", "F")  # modes of 32 bits, whose largest value no file names


def opened(path: str) -> Image.Image:
    """The image of a file, with pixels of 8 bits: those of 16 are divided by 257.

    Raises:
        ValueError: it cannot be read, or its mode is one of `UNSCALED`.
    """
    with header(path) as file:
        file.load()
        if not file.mode.startswith("I;16"):
            return file
        wide = np.asarray(file).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))


@contextmanager
def header(path: str) -> Iterator[Image.Image]:
    """The image of a file, not decoded; errors in the body name the file.

    Raises:
        ValueError: see `opened`.
    """
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait for ever
            raise ValueError("it is no regular file")
        with Image.open(path) as file:
            if file.mode in UNSCALED:
                raise ValueError(
                    f"its mode {file.mode!r} has 32 bits and no known scale; save it with 8 or 16"
                )
            yield file
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"image {path!r} cannot be read: {error}.") from error
