"""Data sets in Pascal VOC's and COCO's format that do not train on wrong annotations."""

from __future__ import annotations

import logging
import os.path as osp
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset
from mmdet.registry import DATASETS
from mmengine.fileio import get_local_path
from mmengine.logging import print_log

from fst.basics.text import counted_as
from fst.basics.values import one_of
from fst.training.detection.annotations import (
    POLICIES,
    Box,
    Size,
    category_ids,
    check_box,
    classes_in_xml,
    names_of_split,
    read_coco,
)
from fst.training.detection.images import find_image, image_size

_NAMED = 20  # classes whose boxes are counted one by one in the log
_UNREADABLE = (  # raised by ElementTree and by mmdet for an XML file that lacks what they read
    AttributeError,
    LookupError,
    OSError,
    OverflowError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _Checked(ABC):
    """Refuses, when it is built, what mmdet would train on without a word.

    That is: an object of a class that is not in ``classes``; a box that is none, or not in its
    image; an image that is missing, is none, or has another size than its annotation says; an id
    that is listed twice.

    Args:
        bad_annotations: "error": raise and name the first fault; "skip": leave faults out (boxes
            that reach out of their image are clipped), and log their number.
        **kwargs: As of mmdet's data set.

    Raises:
        FileNotFoundError: the annotation file is missing.
        ValueError: there is a fault, or no image with an object is left to train on.
    """

    image_prefix: str  # the key of data_prefix for the images' folder: data_root if it is absent

    def __init__(
        self,
        *args: Any,
        bad_annotations: str = "error",
        data_prefix: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        one_of("bad_annotations", bad_annotations, POLICIES)
        self.bad_annotations = bad_annotations
        self._faults: list[str] = []
        data_prefix = {self.image_prefix: "", **(data_prefix or {})}
        super().__init__(*args, data_prefix=data_prefix, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        """Read and check all annotations, and the sizes of all images."""
        if not self._metainfo.get("classes"):
            raise ValueError(
                f"{type(self).__name__} of {self.ann_file!r} needs its class names: "
                "metainfo=dict(classes=[...]), or `classes` in the config."
            )
        images = list(self._read())
        if self._faults:
            first = self._faults[0]
            count = counted_as(len(self._faults), "fault", "faults")
            if self.bad_annotations == "error":
                raise ValueError(
                    f"{self.ann_file!r} has {count}, the first: {first}. Repair them, or leave "
                    "them out with bad_annotations='skip'."
                )
            text = f"{self.ann_file}: {count} left out or clipped, the first: {first}"
            print_log(text, "current", logging.WARNING)
        boxes = Counter(box["bbox_label"] for info in images for box in _learnt(info))
        text = f"{self.ann_file}: {len(images)} images, {boxes.total()} boxes"
        names = self._metainfo["classes"]
        if len(names) <= _NAMED:
            text += ": " + ", ".join(f"{name} {boxes[label]}" for label, name in enumerate(names))
        print_log(text, "current")
        return images

    def filter_data(self) -> list[dict[str, Any]]:
        """As mmdet's, but refuse a result without anything to learn, and warn of one to test."""
        kept = super().filter_data()
        has_boxes = any(_learnt(info) for info in kept)
        if kept and self.test_mode and not has_boxes:
            text = f"{self.ann_file}: no image has an object, so metrics of it say nothing"
            print_log(text, "current", logging.WARNING)
        if kept and (self.test_mode or has_boxes):
            return kept
        raise ValueError(
            f"{self.ann_file!r} has no image with an object of the classes "
            f"{', '.join(self._metainfo['classes'])}: {len(self.data_list)} images could be read, "
            f"of which filter_cfg={self.filter_cfg} leaves {len(kept)}."
        )

    @abstractmethod
    def _read(self) -> Iterator[dict[str, Any]]:
        """The images, as mmdet's ``parse_data_info`` returns them; faults go to ``_faults``."""

    def _size(self, path: str, annotated: Sequence[float | None]) -> Size | None:
        """Width and height of an image as it is loaded; None, and a fault, if it cannot be used.

        Files that are not local are not read.
        """
        is_annotated = all(annotated)
        if self.backend_args is not None or "://" in path:
            if is_annotated:
                return int(annotated[0]), int(annotated[1])
            self._faults.append(f"{path} is not local, and its annotation has no size")
            return None
        try:
            size = image_size(path)
        except (FileNotFoundError, ValueError) as error:
            self._faults.append(f"{path} cannot be read: {error}")
            return None
        if is_annotated and tuple(annotated) != size:
            sizes = ("{} x {}".format(*sides) for sides in (size, annotated))
            self._faults.append(f"{path} is {', but annotated as '.join(sizes)}")
            return None
        return size

    def _box(self, where: str, box: Box, size: Size) -> Box | None:
        usable, fault = check_box(box, size)
        if fault:
            corners = ", ".join(f"{value:g}" for value in box)
            self._faults.append(f"{where}: ({corners}) {fault} of {size[0]} x {size[1]}")
        return usable


def _learnt(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The boxes that a loss counts: not those of crowds, nor difficult ones."""
    return [box for box in info["instances"] if not box.get("ignore_flag")]


@DATASETS.register_module()
class VOCFormatDataset(_Checked, XMLDataset):
    """Any data set in Pascal VOC's format: mmdet's XMLDataset, checked.

    Images are found with any usual extension; a missing size is read from the image.
    """

    image_prefix = "sub_data_root"

    def _read(self) -> Iterator[dict[str, Any]]:
        self.cat2label = {name: label for label, name in enumerate(self._metainfo["classes"])}
        for name, count in Counter(names_of_split(self.ann_file, self.backend_args)).items():
            if count > 1:
                self._faults.append(f"{name} is listed {count} times")
            xml_path = osp.join(self.sub_data_root, self.ann_subdir, f"{name}.xml")
            try:
                info = self._parsed(name, xml_path)
            except _UNREADABLE as error:
                self._faults.append(f"{xml_path}: {type(error).__name__}: {error}")
                continue
            size = self._size(info["img_path"], (info["width"], info["height"]))
            if size is not None:
                info["width"], info["height"] = size
                info["instances"] = list(self._usable(info["instances"], xml_path, size))
                yield info

    def _parsed(self, name: str, xml_path: str) -> dict[str, Any]:
        with get_local_path(xml_path, backend_args=self.backend_args) as path:
            unknown = sorted(classes_in_xml(path) - self.cat2label.keys())
        self._faults += [f"{xml_path}: class {other!r} is not in `classes`" for other in unknown]
        image = find_image(osp.join(self.sub_data_root, self.img_subdir), name)
        file_name = osp.join(self.img_subdir, image)
        return super().parse_data_info(
            {"img_id": name, "file_name": file_name, "xml_path": xml_path}
        )

    def _usable(
        self, instances: Sequence[dict[str, Any]], xml_path: str, size: Size
    ) -> Iterator[dict[str, Any]]:
        for instance in instances:
            name = self._metainfo["classes"][instance["bbox_label"]]
            box = self._box(f"{xml_path}: {name}", instance["bbox"], size)
            if box is not None:
                yield {**instance, "bbox": list(box)}


@DATASETS.register_module()
class CheckedVOCDataset(VOCFormatDataset, VOCDataset):
    """mmdet's VOCDataset (PASCAL VOC, 20 classes), checked."""


@DATASETS.register_module()
class COCOFormatDataset(_Checked, CocoDataset):
    """Any data set in COCO's format: mmdet's CocoDataset, checked.

    Labels follow the order of ``classes``, whatever the order of the file's categories.
    """

    METAINFO: dict[str, Any] = {}
    image_prefix = "img"

    def _read(self) -> Iterator[dict[str, Any]]:
        with get_local_path(self.ann_file, backend_args=self.backend_args) as path:
            data = read_coco(path)
        self.cat_ids = category_ids(data, self._metainfo["classes"], self.ann_file)
        self.cat2label = {cat_id: label for label, cat_id in enumerate(self.cat_ids)}
        self.cat_img_map: dict[int, list[Any]] = defaultdict(list)
        self._names = {category["id"]: category["name"] for category in data["categories"]}
        of_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in data["images"]}
        for annotation in data["annotations"]:
            number = annotation["image_id"]
            if number in of_image:
                of_image[number].append(annotation)
            else:
                where = f"annotation {annotation['id']}"
                self._faults.append(f"{where}: image_id={number!r} is no image of the file")
        for image in data["images"]:
            path = osp.join(self.data_prefix["img"], image["file_name"])
            size = self._size(path, (image.get("width"), image.get("height")))
            if size is not None:
                width, height = size
                usable = list(self._usable(of_image[image["id"]], path, size))
                image = {**image, "img_id": image["id"], "width": width, "height": height}
                yield super().parse_data_info({"raw_img_info": image, "raw_ann_info": usable})

    def _usable(
        self, annotations: Sequence[dict[str, Any]], path: str, size: Size
    ) -> Iterator[dict[str, Any]]:
        for annotation in annotations:
            category = annotation["category_id"]
            where = f"annotation {annotation['id']} of {path}"
            if category not in self.cat2label:
                name = self._names.get(category, category)
                self._faults.append(f"{where}: class {name!r} is not in `classes`")
                continue
            if annotation.get("ignore"):  # which mmdet leaves out
                continue
            x, y, width, height = annotation["bbox"]
            given = (x, y, x + width, y + height)
            box = self._box(where, given, size)
            if box is None:
                continue
            if box != given:
                x1, y1, x2, y2 = box
                annotation = {**annotation, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            self.cat_img_map[category].append(annotation["image_id"])
            yield annotation


@DATASETS.register_module()
class CheckedCocoDataset(COCOFormatDataset):
    """mmdet's CocoDataset (COCO, 80 classes), checked."""

    METAINFO = CocoDataset.METAINFO
