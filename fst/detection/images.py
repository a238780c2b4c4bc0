"""The image files of a data set: where they are, and how large."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from fst.detection.annotations import EXTENSIONS, Size

_SPELLINGS = [spelling for e in EXTENSIONS for spelling in (e, e.upper(), e.title())]
_ORIENTATION = 0x0112  # EXIF's tag: from 5 on the image is turned by 90 degrees


def image_size(path: str) -> Size:
    """Width and height of an image as mmcv loads it, from the file's header alone.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            is_turned = image.getexif().get(_ORIENTATION) in range(5, 9)
    except FileNotFoundError:
        raise
    except Exception as error:  # as Pillow's decoders fail
        raise ValueError(str(error)) from error
    return (height, width) if is_turned else (width, height)


def find_image(folder: str, name: str) -> str:
    """Path of the image ``name`` in any known format; the .jpg's if there is none."""
    stem = Path(folder, name)
    for extension in _SPELLINGS:
        path = stem.with_name(stem.name + extension)
        if path.is_file():
            return str(path)
    return str(stem.with_name(stem.name + EXTENSIONS[0]))
