"""mmdet's data sets, which refuse what mmdet would train on, or skip, without a word."""

from __future__ import annotations

import logging
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset
from mmdet.registry import DATASETS
from mmengine.logging import print_log
from PIL import Image

from fst.basics.text import counted_as
from fst.basics.values import one_of

POLICIES = ("error", "skip")
NEEDED = {"id", "bbox", "area", "category_id"}  # of an annotation in a COCO file
ORIENTATION = 0x0112  # EXIF's tag: from 5 on the image is loaded turned by 90 degrees


class _Checked:
    """Names the first fault of the annotations by file and id, when the data set is built.

    A fault is: an object of a class that is not in ``classes``; a box that is none, or reaches out
    of its image; an image that cannot be opened, has another size than its annotation says, or is
    listed twice.

    Args:
        bad_annotations: "error": raise; "skip": log the number of faults, and let mmdet treat them
            as it does: it skips such objects, but takes boxes that reach out of the image.
        **kwargs: as of mmdet's data set.

    Raises:
        ValueError: there is a fault, or no box to train on.
    """

    def __init__(self, *args: Any, bad_annotations: str = "error", **kwargs: Any) -> None:
        one_of("bad_annotations", bad_annotations, POLICIES)
        self.bad_annotations = bad_annotations
        self._faults: list[str] = []
        super().__init__(*args, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        """As mmdet's; logs the number of boxes of each class."""
        images = super().load_data_list()
        listed = Counter(image["img_id"] for image in images)
        self._faults += [f"image {name!r} is listed twice" for name in listed if listed[name] > 1]
        if self._faults:
            count = counted_as(len(self._faults), "fault", "faults")
            text = f"{self.ann_file!r} has {count}, the first: {self._faults[0]}"
            if self.bad_annotations == "error":
                raise ValueError(
                    f"{text}. Repair them, or train all the same with bad_annotations='skip'."
                )
            print_log(text, "current", logging.WARNING)
        every = (box for image in images for box in image["instances"])
        boxes = Counter(box["bbox_label"] for box in every if not box["ignore_flag"])
        classes = self.metainfo["classes"]
        if not boxes and not self.test_mode:
            raise ValueError(f"{self.ann_file!r} has no box of the classes {', '.join(classes)}.")
        counts = ", ".join(f"{name} {boxes[label]}" for label, name in enumerate(classes))
        print_log(f"{self.ann_file}: {len(images)} images, boxes: {counts}", "current")
        return images

    def _check_image(self, info: dict[str, Any]) -> None:
        """Compare an image's annotated size with the file's, which is read from its header."""
        path, annotated = info["img_path"], (info["width"], info["height"])
        if self.backend_args is not None:  # the file is not local
            return
        try:
            with Image.open(path) as image:
                size = image.size
                if image.getexif().get(ORIENTATION) in range(5, 9):
                    size = size[::-1]
        except OSError as error:
            self._faults.append(f"{path} cannot be read: {error}")
            return
        if size != annotated:
            text = "{} is {} x {}, but annotated as {} x {}"
            self._faults.append(text.format(path, *size, *annotated))

    def _check_box(self, where: str, box: Sequence[float], info: dict[str, Any]) -> None:
        """Compare a box, x1, y1, x2, y2, with its image; a pixel beyond the edge is no fault."""
        x1, y1, x2, y2 = box
        width, height = info["width"], info["height"]
        is_within = min(x1, y1) >= -1 and x2 <= width + 1 and y2 <= height + 1
        if not (is_within and x2 - x1 >= 1 and y2 - y1 >= 1):  # so that NaN is a fault too
            self._faults.append(
                f"{where}: ({x1:g}, {y1:g}, {x2:g}, {y2:g}) is no box within {width} x {height}"
            )


@DATASETS.register_module()
class CheckedCocoDataset(_Checked, CocoDataset):
    """mmdet's CocoDataset, checked."""

    def parse_data_info(self, raw_data_info: dict[str, Any]) -> dict[str, Any]:
        """As mmdet's, which is given an image and its annotations."""
        names = [self.coco.cats[number]["name"] for number in self.cat_ids]
        if names != list(self.metainfo["classes"]):  # mmdet labels in the order of the file
            known = [category["name"] for category in self.coco.cats.values()]
            raise ValueError(
                f"classes={list(self.metainfo['classes'])} must be categories of "
                f"{self.ann_file!r}, in its order: {known}."
            )
        for annotation in raw_data_info["raw_ann_info"]:
            if absent := NEEDED - annotation.keys():
                raise ValueError(f"{self.ann_file!r}: no {absent} in the annotation {annotation}.")
        info = super().parse_data_info(raw_data_info)
        self._check_image(info)
        for annotation in raw_data_info["raw_ann_info"]:
            category, (x, y, width, height) = annotation["category_id"], annotation["bbox"]
            where = f"annotation {annotation['id']} of {info['img_path']}"
            if category not in self.cat_ids:
                name = self.coco.cats.get(category, {}).get("name", category)
                self._faults.append(f"{where}: class {name!r} is not in `classes`")
            self._check_box(where, (x, y, x + width, y + height), info)
        return info


@DATASETS.register_module()
class CheckedXMLDataset(_Checked, XMLDataset):
    """mmdet's XMLDataset (any data set in Pascal VOC's format), checked."""

    def parse_data_info(self, img_info: dict[str, Any]) -> dict[str, Any]:
        """As mmdet's, which is given the names of an image's files."""
        path = img_info["xml_path"]
        names = classes_in_xml(path)
        try:
            info = super().parse_data_info(img_info)
        except Exception as error:  # of many kinds, and without the file's name
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
        self._check_image(info)
        for name in sorted(names - self.cat2label.keys()):
            self._faults.append(f"{path}: class {name!r} is not in `classes`")
        for box in info["instances"]:
            name = self.metainfo["classes"][box["bbox_label"]]
            self._check_box(f"{path}: {name}", box["bbox"], info)
        return info


@DATASETS.register_module()
class CheckedVOCDataset(CheckedXMLDataset, VOCDataset):
    """mmdet's VOCDataset (PASCAL VOC, 20 classes), checked."""


def classes_in_xml(path: str) -> set[str]:
    """The names of the objects in one of Pascal VOC's annotations.

    Raises:
        ValueError: it is no XML file.
    """
    try:
        return {element.text or "" for element in ET.parse(path).iterfind("object/name")}
    except (ET.ParseError, LookupError) as error:  # of no file, or of an unknown encoding
        raise ValueError(f"{path}: {error}") from error
