"""Annotations in Pascal VOC's and COCO's files, and the faults that mmdet would train on."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.fileio import list_from_file

POLICIES = ("error", "skip")
KEYS = {  # that every entry of a COCO file has
    "images": {"id", "file_name"},
    "categories": {"id", "name"},
    "annotations": {"id", "image_id", "category_id", "bbox"},
}
Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
Size = tuple[int, int]  # width, height


def names_of_split(path: str, backend_args: dict[str, Any] | None = None) -> list[str]:
    """The names in a Pascal VOC file of a split, which has one on each line."""
    lines = list_from_file(path, encoding="utf-8-sig", backend_args=backend_args)
    return [name for line in lines if (name := line.strip())]


def classes_in_xml(path: str) -> set[str]:
    """The names of the objects in one Pascal VOC annotation."""
    return {element.text or "" for element in ET.parse(path).iterfind("object/name")}


def read_coco(path: str) -> dict[str, list[dict[str, Any]]]:
    """Read a COCO annotation file, and complete what may be absent.

    That is ``annotations`` (of test sets), and ``area`` and ``iscrowd`` of each of them.

    Raises:
        ValueError: it is no such file, or two images, annotations or categories have one id.
    """
    where = ""
    try:
        data = {"annotations": [], **json.loads(Path(path).read_bytes())}
        for kind, keys in KEYS.items():
            where, seen = "", set()
            for number, entry in enumerate(data[kind]):
                where = f" at {kind}[{number}]"
                if absent := keys - entry.keys():
                    raise ValueError(f"no {', '.join(sorted(absent))}")
                if entry["id"] in seen:
                    raise ValueError(f"id {entry['id']!r} is used twice")
                seen.add(entry["id"])
                if kind == "annotations":
                    _complete(entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"COCO annotation file {path!r}{where}: {reason}.") from error
    return data


def _complete(annotation: dict[str, Any]) -> None:
    x, y, width, height = map(float, annotation["bbox"])
    annotation["bbox"] = [x, y, width, height]
    if annotation.get("area") is None:
        annotation["area"] = width * height
    annotation["iscrowd"] = int(annotation.get("iscrowd") or 0)


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


def check_box(box: Box, size: Size) -> tuple[Box | None, str]:
    """Look for what mmdet does not notice in a box.

    Returns:
        The box as it can be used (clipped if it reaches out by over a pixel, None if it is none),
        and what is wrong with it ("" if nothing is).
    """
    x1, y1, x2, y2 = box
    width, height = size
    if not (x2 - x1 >= 1 and y2 - y1 >= 1):  # so that NaN is none either
        return None, "is no box of a pixel or more"
    clipped = (max(x1, 0), max(y1, 0), min(x2, width), min(y2, height))
    if clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        return None, "is outside of the image"
    if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
        return clipped, "reaches out of the image"
    return box, ""
