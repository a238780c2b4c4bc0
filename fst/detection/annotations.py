"""What can be wrong with annotations, found before training instead of during it."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

import msgspec
from mmengine.fileio import list_from_file

from fst.basics.text import counted_as

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif")
POLICIES = ("error", "skip")
Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str  # as COCO's metric compares it
Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
Size = tuple[int, int]  # width, height


class Kind(Enum):
    """A kind of bad input, and what becomes of it if it is not an error."""

    MISSING_IMAGE = ("image missing", "image left out")
    BROKEN_IMAGE = ("file is no image", "image left out")
    MISSING_ANNOTATION = ("annotation file missing", "image left out")
    BROKEN_ANNOTATION = ("annotation file malformed", "image left out")
    DUPLICATE = ("id used twice", "first one kept")
    WRONG_SIZE = ("annotated size is not that of the image as it is loaded", "image left out")
    NO_SIZE = ("image without width and height", "read from the image")
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
        total = self.counts.total()
        lines = [f"{self.source}: {counted_as(total, 'problem', 'problems')}"]
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


def names_of_split(path: str, backend_args: dict[str, Any] | None = None) -> list[str]:
    """The names in a Pascal VOC file of a split, which has one on each line.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        lines = list_from_file(path, encoding="utf-8-sig", backend_args=backend_args)
    except UnicodeDecodeError as error:
        raise ValueError(f"split file {path!r} is no UTF-8: {error}.") from error
    return [name for line in lines if (name := line.strip())]


def read_voc(path: str) -> tuple[Size | None, list[VOCObject | str]]:
    """Read a Pascal VOC annotation.

    Returns:
        The annotated size, None if it is absent or not positive; and the objects in file order,
        a malformed one as a text that says what is wrong.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or is no XML.
    """
    try:
        root = ET.parse(path).getroot()
    except FileNotFoundError:
        raise
    except (ET.ParseError, LookupError, OSError) as error:  # LookupError: of unknown encodings
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


class Image(msgspec.Struct):
    """An entry of COCO's ``images``."""

    id: Id
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    width: float | None = None
    height: float | None = None


class _RunLengths(msgspec.Struct):
    counts: list[int] | str
    size: tuple[int, int]


class Annotation(msgspec.Struct):
    """An entry of COCO's ``annotations``."""

    id: Id
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]
    area: float | None = None
    iscrowd: Literal[0, 1] | bool | None = None
    ignore: Literal[0, 1] | bool | None = None
    segmentation: list[list[float]] | _RunLengths | None = None


class _Category(msgspec.Struct):
    id: Id
    name: str


class _CocoFile(msgspec.Struct):
    images: Annotated[list[Any], msgspec.Meta(min_length=1)]
    categories: Annotated[list[_Category], msgspec.Meta(min_length=1)]
    annotations: list[Any] = []


def read_coco(path: str) -> dict[str, list[dict[str, Any]]]:
    """Read a COCO annotation file; ``annotations`` may be absent (test sets).

    Raises:
        ValueError: it is no JSON, lists no images or no categories, or uses a category id or
            name twice.
    """
    try:
        data = msgspec.json.decode(Path(path).read_bytes(), type=_CocoFile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path!r} is no COCO annotation file: {error}.") from error
    for key in ("id", "name"):
        value, count = Counter(str(getattr(c, key)) for c in data.categories).most_common(1)[0]
        if count > 1:
            raise ValueError(f"annotation file {path!r}: 'categories' has {key} {value} twice.")
    return msgspec.to_builtins(data)


def usable(
    entries: Sequence[Any],
    kind: type[Image] | type[Annotation],
    report: Callable[[Kind, str], object] = lambda *_: None,
) -> Iterator[dict[str, Any]]:
    """The entries of a COCO list that can be used: of each id the first; ``report`` gets others."""
    name, seen = kind.__name__.lower(), set()
    for number, entry in enumerate(entries):
        try:
            msgspec.convert(entry, kind)
        except msgspec.ValidationError as error:
            report(Kind.MALFORMED, f"{name} number {number}: {shortened(entry)}: {error}")
            continue
        if entry["id"] in seen:
            report(Kind.DUPLICATE, f"{name} id {entry['id']}")
        else:
            seen.add(entry["id"])
            yield entry


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
