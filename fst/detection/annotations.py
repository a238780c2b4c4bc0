"""What can be wrong with annotations, found before training instead of during it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from reprlib import repr as shortened
from typing import Any

from fst.basics.text import counted_as
from fst.basics.values import is_integer, is_number

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif")
POLICIES = ("error", "skip")
LARGEST_ID = 2**63 - 1  # of the integers in which COCO's metric compares ids
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


def split_name(line: str, has_xml: Callable[[str], bool]) -> str:
    """The image that a line of a VOC split file names.

    Beside plain names there are ``name.jpg`` and, in the lists of one class, ``name 1``,
    ``name -1`` and ``name 0``. A line that has an XML file of its own is a plain name.
    """
    name = line.strip()
    if not name or has_xml(name):
        return name
    first, *flag = name.rsplit(maxsplit=1)
    if flag in (["1"], ["-1"], ["0"]):
        name = first
    path = PurePath(name)
    return str(path.with_suffix("")) if path.suffix.lower() in EXTENSIONS else name


def read_coco(path: str) -> dict[str, list[dict[str, Any]]]:
    """Read a COCO annotation file; ``annotations`` may be absent (test sets).

    Raises:
        ValueError: it is no JSON, lists no images or no categories, or uses a category id or
            name twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except ValueError as error:  # of text, JSON, or the digits of a number
        raise ValueError(f"annotation file {path!r} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"annotation file {path!r} is no COCO file: it nests too deep.") from error
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
    for category in data["categories"]:
        if not is_id(category["id"]) or not isinstance(category["name"], str):
            raise ValueError(
                f"annotation file {path!r}: 'categories' has {shortened(category)}; an id must be "
                "an integer or a text, a name a text."
            )
    return data


def is_id(value: Any) -> bool:
    """Whether a value of a JSON file can name an image, an annotation or a category."""
    if isinstance(value, str):
        return True
    return is_integer(value) and -LARGEST_ID <= value <= LARGEST_ID


def _is_finite(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number that fits a float."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def fault_of_id(entry: Any) -> str:
    """What is wrong with the id of an entry of a COCO list; empty if nothing is."""
    has_id = isinstance(entry, dict) and is_id(entry.get("id"))
    return "" if has_id else f"{shortened(entry)} has no id that is an integer or a text"


def fault_of_image(image: Any) -> str:
    """What is wrong with an entry of COCO's ``images``; empty if nothing is."""
    if fault := fault_of_id(image):
        return fault
    if not isinstance(image.get("file_name"), str) or not image["file_name"]:
        return f"file_name={shortened(image.get('file_name'))} is no text"
    for side in ("width", "height"):
        if image.get(side) is not None and not _is_finite(image[side]):
            return f"{side}={shortened(image[side])} is no number"
    return ""


def fault_of_annotation(annotation: Any) -> str:
    """What is wrong with an entry of COCO's ``annotations`` beside its id; empty if nothing is."""
    for key in ("image_id", "category_id"):
        if not is_id(annotation.get(key)):
            return f"{key}={shortened(annotation.get(key))} is no integer and no text"
    if coco_box(annotation) is None:
        return f"bbox={shortened(annotation.get('bbox'))} is not four numbers"
    if annotation.get("area") is not None and not _is_finite(annotation["area"]):
        return f"area={shortened(annotation['area'])} is no number"
    for key in ("iscrowd", "ignore"):
        if annotation.get(key) not in (None, 0, 1):
            return f"{key}={shortened(annotation[key])} is neither 0 nor 1"
    if not _is_segmentation(annotation.get("segmentation")):
        return f"segmentation={shortened(annotation['segmentation'])} is no polygons and no RLE"
    return ""


def _is_segmentation(value: Any) -> bool:
    """Whether a value is COCO's segmentation: polygons, a run-length encoding, or nothing."""
    if isinstance(value, dict):
        counts, size = value.get("counts"), value.get("size")
        is_size = isinstance(size, list) and len(size) == 2 and all(map(is_integer, size))
        is_list = isinstance(counts, list) and all(map(is_integer, counts))
        return is_size and (is_list or isinstance(counts, str))
    if not isinstance(value, list):
        return value is None
    return all(
        isinstance(polygon, list) and len(polygon) % 2 == 0 and all(map(_is_finite, polygon))
        for polygon in value
    )


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
    if not all(map(_is_finite, bbox)):
        return None
    x, y, width, height = bbox
    corners = (x, y, x + width, y + height)
    return corners if all(map(_is_finite, corners)) else None


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
