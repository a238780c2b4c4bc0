"""A look at every image before training: each is decoded once, and again only if it changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from mmengine.dist import is_main_process
from mmengine.logging import print_log
from PIL import Image
from tqdm import tqdm

from fst.backends.cache import folder as cache_folder
from fst.checkpoint import write_text_atomically
from fst.detection.annotations import EXTENSIONS, Kind, Size

_SPELLINGS = [spelling for e in EXTENSIONS for spelling in (e, e.upper(), e.title())]

_JPEG = ("JPEG", "MPO")
_ORIENTATION = 0x0112  # EXIF tag: from 2 on images are mirrored or turned, from 5 on by 90 degrees
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
    cv2.error,
)
# What libjpeg prints where it makes up pixels. Whole files may end with a few bytes too many.
_BROKEN = re.compile(rb"premature end of|bad Huffman|instead of RST|(\d{3,}|[5-9]\d) extraneous")
_THREADS = 8
_CHUNK = 64  # images between two looks at what libjpeg has printed
_SECONDS = 20.0  # between two lines of progress in the log


class Probe(NamedTuple):
    """What a look at an image file tells: its sizes, or why it cannot be used."""

    stored: Size | None = None
    turned: Size | None = None  # as loaded where EXIF's orientation is followed
    orientation: int = 1
    problem: Kind | None = None
    detail: str = ""

    def loaded(self, follows_exif: bool) -> Size | None:
        """The size that training sees."""
        return self.turned if follows_exif else self.stored

    def is_ambiguous(self, annotated: tuple[Any, Any], follows_exif: bool) -> bool:
        """Whether boxes of an image annotated with this size may be those of the other way up.

        Where EXIF is followed, only a size that is the turned image's alone makes it clear. Where
        it is not, the boxes are said to be the stored image's, and only that size contradicts.
        """
        if self.orientation == 1:
            return False
        only_turned = annotated == self.turned != self.stored
        return not only_turned if follows_exif else only_turned


def probe_image(path: str, decode: bool = True) -> Probe:
    """Read an image's header and, with ``decode``, all of its pixels."""
    with _printed_by_c() as printed:
        probe = _look(path, decode)
        if _BROKEN.search(printed()) and probe.problem is None:
            return Probe(problem=Kind.BROKEN_IMAGE, detail="damaged in the middle")
    return probe


def probe_images(paths: Sequence[str], source: str) -> Iterator[Probe]:
    """`probe_image` of each path, those unchanged since the last time from a file in the cache.

    Args:
        paths: The images.
        source: The file that lists them: it names the file in the cache, and the progress.
    """
    file = _cache_file(source)
    before, after = _read_cache(file), {}
    start = last = time.monotonic()
    bar = tqdm(total=len(paths), desc=f"Images of {source}", disable=_bar_is_off(), leave=False)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(paths), _CHUNK):
            chunk = paths[first : first + _CHUNK]
            states = {path: _state(path) for path in chunk}
            found = {path: _remembered(before.get(path), states[path]) for path in chunk}
            new = [path for path, probe in found.items() if probe is None]
            with _printed_by_c() as printed:
                probes = list(pool.map(_look, new))
                is_damaged = _BROKEN.search(printed()) is not None
            # libjpeg does not say which: one after the other tells
            probes = [probe_image(path) for path in new] if is_damaged else probes
            found.update(zip(new, probes, strict=True))
            for path, probe in found.items():
                if probe.problem is None:
                    after[path] = [*states[path], *probe.stored, *probe.turned, probe.orientation]
            yield from (found[path] for path in chunk)
            bar.update(len(chunk))
            if time.monotonic() - last > _SECONDS:
                last, done = time.monotonic(), first + len(chunk)
                left = (last - start) * (len(paths) - done) / done
                print_log(
                    f"Checking images of {source}: {done}/{len(paths)}, {left:.0f} s left",
                    "current",
                )
    if after != before and is_main_process():
        _write_cache(file, after)


def follows_exif(transforms: Sequence[Any]) -> bool:
    """Whether a pipeline's LoadImageFromFile turns images as EXIF says; so it does by default."""
    loader = next((t for t in transforms if hasattr(t, "imdecode_backend")), None)
    color_type = getattr(loader, "color_type", "color")
    is_blind = getattr(loader, "imdecode_backend", None) in ("turbojpeg", "tifffile")
    return not (is_blind or color_type == "unchanged" or "ignore_orientation" in color_type)


def _look(path: str, decode: bool = True) -> Probe:
    try:
        with Image.open(path) as image:
            stored, orientation = image.size, image.getexif().get(_ORIENTATION, 1)
            is_jpeg = image.format in _JPEG
            if decode and not is_jpeg:
                image.load()
        orientation = int(orientation) if orientation in range(2, 9) else 1
        turned = stored[::-1] if orientation >= 5 else stored
        if decode and (is_jpeg or orientation > 1):
            small = cv2.IMREAD_REDUCED_GRAYSCALE_8
            kind = small if orientation == 1 else cv2.IMREAD_GRAYSCALE
            pixels = cv2.imdecode(np.frombuffer(Path(path).read_bytes(), np.uint8), kind)
            if pixels is None:
                return Probe(problem=Kind.BROKEN_IMAGE, detail="OpenCV cannot decode it")
            if orientation >= 5 and pixels.shape[::-1] == stored != turned:
                turned, orientation = stored, 1  # a format in which OpenCV does not follow EXIF
    except FileNotFoundError:
        return Probe(problem=Kind.MISSING_IMAGE)
    except _UNREADABLE as error:
        return Probe(problem=Kind.BROKEN_IMAGE, detail=str(error))
    return Probe(stored, turned, orientation)


@contextmanager
def _printed_by_c() -> Iterator[Callable[[], bytes]]:
    """What C libraries print meanwhile: libjpeg says in no other way that data are damaged."""
    with tempfile.TemporaryFile() as file:

        def printed() -> bytes:
            file.seek(0)
            return file.read()

        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _bar_is_off() -> bool | None:
    return None if is_main_process() else True  # None: where nobody sits before a terminal


def _state(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (-1, -1)
    return (status.st_size, status.st_mtime_ns)


def _cache_file(source: str) -> Path:
    key = f"{os.path.abspath(source)} {os.getcwd()} {cv2.__version__}"
    return cache_folder() / f"images_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read_cache(file: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_cache(file: Path, content: dict[str, list[int]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(json.dumps(content), file)
    except OSError as error:
        print_log(f"{file} cannot be written, images will be checked again: {error}", "current")


def _remembered(entry: list[int] | None, state: tuple[int, int]) -> Probe | None:
    if entry is None or len(entry) != 7 or tuple(entry[:2]) != state:
        return None
    return Probe(tuple(entry[2:4]), tuple(entry[4:6]), entry[6])


def find_image(folder: str, name: str) -> str:
    """Path of the image ``name`` in any known format; the .jpg's if there is none."""
    stem = Path(folder, name)
    for extension in _SPELLINGS:
        path = stem.with_name(stem.name + extension)
        if path.is_file():
            return str(path)
    return str(stem.with_name(stem.name + EXTENSIONS[0]))
