"""The image files of a data set: where they are, and how large."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fst.detection.annotations import EXTENSIONS, Size

_SPELLINGS = [spelling for e in EXTENSIONS for spelling in (e, e.upper(), e.title())]
_ORIENTATION = 0x0112  # EXIF's tag: from 5 on the image is turned by 90 degrees
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


def image_size(path: str, is_turned: bool) -> Size:
    """Width and height of an image as it is loaded, from the file's header alone.

    Args:
        path: The file.
        is_turned: Whether the loading turns it as EXIF says, see `follows_exif`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            orientation = image.getexif().get(_ORIENTATION) if is_turned else None
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise ValueError(str(error)) from error
    return (height, width) if orientation in range(5, 9) else (width, height)


def follows_exif(transforms: Sequence[Any]) -> bool:
    """Whether a pipeline's LoadImageFromFile turns images as EXIF says; so it does by default."""
    loader = next((t for t in transforms if hasattr(t, "imdecode_backend")), None)
    color_type = getattr(loader, "color_type", "color")
    is_blind = getattr(loader, "imdecode_backend", None) in ("turbojpeg", "tifffile")
    return not (is_blind or color_type == "unchanged" or "ignore_orientation" in color_type)


def find_image(folder: str, name: str) -> str:
    """Path of the image ``name`` in any known format; the .jpg's if there is none."""
    stem = Path(folder, name)
    for extension in _SPELLINGS:
        path = stem.with_name(stem.name + extension)
        if path.is_file():
            return str(path)
    return str(stem.with_name(stem.name + EXTENSIONS[0]))
