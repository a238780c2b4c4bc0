"""What can be wrong with annotations and images, found before training instead of during it."""

from __future__ import annotations

import json
import math
import struct
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
POLICIES = ("error", "skip")
Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
Size = tuple[int, int]  # width, height

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_ORIENTATION = 0x0112  # EXIF tag; from 5 on width and height are exchanged on loading
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


class Kind(Enum):
    """A kind of bad input, and what becomes of it if it is not an error."""

    MISSING_IMAGE = ("image missing", "image left out")
    BROKEN_IMAGE = ("image truncated or unreadable", "image left out")
    MISSING_ANNOTATION = ("annotation file missing", "image left out")
    BROKEN_ANNOTATION = ("annotation file malformed", "image left out")
    DUPLICATE = ("id used twice", "first one kept")
    WRONG_SIZE = ("annotated size is not the image's", "the image's size taken")
    MALFORMED = ("annotation malformed", "left out")
    ORPHAN = ("annotation of an image that is not listed", "left out")
    UNKNOWN_CLASS = ("object of a class that is not in `classes`", "left out")
    NO_AREA = ("box without area (less than a pixel)", "left out")
    OUTSIDE = ("box outside of its image", "left out")
    REACHING = ("box reaching out of its image", "clipped")


_MISSING_FILES = {Kind.MISSING_IMAGE, Kind.MISSING_ANNOTATION}


class Problems:
    """What is wrong in one data set: counts, and the first examples of each kind."""

    examples_per_kind = 3

    def __init__(self, source: str) -> None:
        self.source = source
        self.counts: Counter[Kind] = Counter()
        self._examples: dict[Kind, list[str]] = defaultdict(list)

    def add(self, kind: Kind, where: str) -> None:
        """Count one problem; ``where`` names file, image and box."""
        self.counts[kind] += 1
        if len(self._examples[kind]) < self.examples_per_kind:
            self._examples[kind].append(where)

    def report(self, with_effect: bool) -> str:
        """One line per kind: count, what became of it, examples."""
        lines = [f"{self.source}: {self.counts.total()} problems"]
        for kind, count in self.counts.items():
            text, effect = kind.value
            if with_effect:
                text = f"{text} ({effect})"
            rest = count - len(self._examples[kind])
            more = f"; and {rest} more" if rest else ""
            lines.append(f"  {count} x {text}: {'; '.join(self._examples[kind])}{more}")
        return "\n".join(lines)

    def raise_if_any(self) -> None:
        """Raise FileNotFoundError if all that is wrong is missing files, else ValueError."""
        if self.counts:
            error = FileNotFoundError if set(self.counts) <= _MISSING_FILES else ValueError
            raise error(
                f"{self.report(with_effect=False)}\n"
                "Repair them, or leave them out with bad_annotations='skip'."
            )


@dataclass
class VOCObject:
    """One <object>; its box is as in the file: counted from 1, both corners included."""

    name: str
    is_difficult: bool
    box: Box


def read_voc(path: str) -> tuple[Size | None, list[VOCObject | str]]:
    """Read a Pascal VOC annotation.

    Returns:
        The annotated size, None if it is absent or not positive; and the objects in file order,
        a malformed one as a text that says what is wrong.

    Raises:
        ValueError: the file is no XML.
    """
    try:
        root = ET.parse(path).getroot()
    except ET.ParseError as error:
        raise ValueError(str(error)) from error
    size = (_number(root, "size/width"), _number(root, "size/height"))
    objects = [_voc_object(element) for element in root.findall("object")]
    has_size = all(math.isfinite(side) and side >= 1 for side in size)
    return (int(size[0]), int(size[1])) if has_size else None, objects


def _voc_object(element: ET.Element) -> VOCObject | str:
    name = (element.findtext("name") or "").strip()
    if not name:
        return "<object> without <name>"
    x1, y1, x2, y2 = (_number(element, f"bndbox/{tag}") for tag in ("xmin", "ymin", "xmax", "ymax"))
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return f"{name} without a <bndbox> of four numbers"
    return VOCObject(name, _number(element, "difficult") == 1, (x1, y1, x2, y2))


def _number(element: ET.Element, path: str) -> float:
    try:
        return float(element.findtext(path) or "nan")
    except ValueError:
        return math.nan


def read_coco(path: str) -> dict[str, list[dict[str, Any]]]:
    """Read a COCO annotation file; ``annotations`` may be absent (test sets).

    Raises:
        ValueError: it is no JSON, lists no images or no categories, or uses a category id or
            name twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"annotation file {path!r} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"annotation file {path!r} holds a {type(data).__name__}, not COCO's object with "
            "images, annotations and categories."
        )
    for key in ("images", "categories"):
        if not isinstance(data.get(key), list) or not data[key]:
            raise ValueError(f"annotation file {path!r} lists no {key}.")
    if not isinstance(data.setdefault("annotations", []), list):
        raise ValueError(f"annotation file {path!r}: 'annotations' is no list.")
    for key in ("id", "name"):
        values = [c.get(key) if isinstance(c, dict) else None for c in data["categories"]]
        value, count = Counter(map(str, values)).most_common(1)[0]
        if count > 1 or None in values:
            what = f"{key} {value} twice" if count > 1 else f"a category without {key}"
            raise ValueError(f"annotation file {path!r}: 'categories' has {what}.")
    return data


def category_ids(data: dict[str, Any], classes: Sequence[str], path: str) -> list[int]:
    """The category ids of ``classes``, in the order of ``classes`` (not of the file).

    Raises:
        ValueError: the file has no category of that name.
    """
    ids = {category["name"]: category["id"] for category in data["categories"]}
    absent = [name for name in classes if name not in ids]
    if absent:
        raise ValueError(
            f"annotation file {path!r} has no category named {', '.join(map(repr, absent))}; "
            f"its categories: {', '.join(map(str, ids))}."
        )
    return [ids[name] for name in classes]


def coco_box(annotation: dict[str, Any]) -> Box | None:
    """Corners of an annotation's ``bbox`` (x, y, width, height); None if it is malformed."""
    bbox = annotation.get("bbox")
    if not isinstance(bbox, list) or len(bbox) != 4:
        return None
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in bbox):
        return None
    x, y, width, height = bbox
    return (x, y, x + width, y + height)


def check_box(box: Box, size: Size) -> tuple[Box | None, Kind | None]:
    """A box as it may be used: None if it must go, clipped if it reaches out by over a pixel."""
    x1, y1, x2, y2 = box
    width, height = size
    if x2 - x1 < 1 or y2 - y1 < 1:
        return None, Kind.NO_AREA
    clipped = (max(x1, 0), max(y1, 0), min(x2, width), min(y2, height))
    if clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        return None, Kind.OUTSIDE
    if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
        return clipped, Kind.REACHING
    return box, None


class Probe(NamedTuple):
    """What a look at an image file tells: its size, or why it cannot be used."""

    sizes: tuple[Size, ...] = ()  # as loaded; as stored, where EXIF turns the image
    problem: Kind | None = None
    detail: str = ""


def probe_image(path: str) -> Probe:
    """Read an image's header and look at its last bytes; decode it only if they are unusual."""
    try:
        with Image.open(path) as image:
            stored = image.size
            end = _ENDS.get(image.format or "")
            if end is None or not _ends_with(path, end):
                image.load()
            is_turned = image.getexif().get(_ORIENTATION, 1) >= 5
    except FileNotFoundError:
        return Probe(problem=Kind.MISSING_IMAGE)
    except _UNREADABLE as error:
        return Probe(problem=Kind.BROKEN_IMAGE, detail=str(error))
    return Probe((stored[::-1], stored) if is_turned else (stored,))


def _ends_with(path: str, end: bytes) -> bool:
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - len(end), 0))
        return file.read() == end


def find_image(folder: str, name: str) -> str:
    """Path of the image ``name`` in any known format; the .jpg's if there is none."""
    stem = Path(folder, name)
    for extension in _spellings(EXTENSIONS):
        path = stem.with_name(stem.name + extension)
        if path.is_file():
            return str(path)
    return str(stem.with_name(stem.name + EXTENSIONS[0]))


def _spellings(extensions: Iterable[str]) -> list[str]:
    return [spelling for e in extensions for spelling in (e, e.upper())]
