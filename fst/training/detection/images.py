"""The image files of a data set."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from fst.training.detection.annotations import Size
from fst.training.engine.data.images import check_whole

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif")
_SPELLINGS = [spelling for e in EXTENSIONS for spelling in (e, e.upper(), e.title())]
_ORIENTATION = 0x0112  # EXIF's tag: from 5 on the image is turned by 90 degrees


def image_size(path: str) -> Size:
    """Width and height of an image as mmcv loads it, from the file's header; its end is there too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no image, or a part of one.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            is_turned = image.getexif().get(_ORIENTATION) in range(5, 9)
            check_whole(path, image.format)
    except FileNotFoundError:
        raise
    except Exception as error:  # as Pillow's decoders fail
        raise ValueError(str(error)) from error
    return (height, width) if is_turned else (width, height)


def find_image(folder: str, name: str) -> str:
    """The file in ``folder`` that is ``name`` with a known extension; ``name``.jpg if none is."""
    files = (name + spelling for spelling in _SPELLINGS)
    return next((file for file in files if Path(folder, file).is_file()), name + EXTENSIONS[0])
