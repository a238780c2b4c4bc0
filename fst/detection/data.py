"""Data sets in Pascal VOC's and COCO's layout, checked before training."""

from __future__ import annotations

import logging
import os.path as osp
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset
from mmdet.registry import DATASETS
from mmengine.fileio import exists, get_local_path
from mmengine.logging import print_log

from fst.basics.values import one_of
from fst.detection.annotations import (
    POLICIES,
    Annotation,
    Image,
    Kind,
    Problems,
    VOCObject,
    category_ids,
    check_box,
    names_of_split,
    read_coco,
    read_voc,
    usable,
)
from fst.detection.images import find_image, image_size

_NAMED = 20  # classes whose boxes are counted one by one in the log


class _Checked(ABC):
    """A look at every annotation and image when the data set is built.

    Args:
        bad_annotations: "error": raise and name what is bad; "skip": leave it out (boxes that
            reach out of their image are clipped) and log how much of each kind.
        **kwargs: As of mmdet's data set.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: anything else is bad; or, whatever the policy, no usable image is left.
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
        data_prefix = {self.image_prefix: "", **(data_prefix or {})}
        super().__init__(*args, data_prefix=data_prefix, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        """Read and check all annotations and images."""
        if not self._metainfo.get("classes"):
            raise ValueError(
                f"{type(self).__name__} of {self.ann_file!r} needs its class names: "
                "metainfo=dict(classes=[...]), or `classes` in the config."
            )
        if not exists(self.ann_file, backend_args=self.backend_args):
            raise FileNotFoundError(f"annotation file {self.ann_file!r} does not exist.")
        problems = Problems(self.ann_file)
        images = list(self._read(problems))
        images = list(self._with_sizes(images, problems))
        for info in images:
            info["instances"] = list(self._checked(info, problems))
        if self.bad_annotations == "error":
            problems.raise_if_any()
        elif problems.counts:
            print_log(problems.report(with_effect=True), "current", logging.WARNING)
        print_log(self._summary(images), "current")
        return images

    def _summary(self, images: list[dict[str, Any]]) -> str:
        boxes = Counter(box["bbox_label"] for info in images for box in info["instances"])
        names = self._metainfo["classes"]
        of_each = f"of {len(names)} classes"
        if len(names) <= _NAMED:
            of_each = ", ".join(f"{name} {boxes[label]}" for label, name in enumerate(names))
        summary = f"{self.ann_file}: {len(images)} images, {boxes.total()} boxes: {of_each}"
        empty = sum(not info["instances"] for info in images)
        if not empty:
            return summary
        leaves_out = not self.test_mode and (self.filter_cfg or {}).get("filter_empty_gt")
        effect = "left out: filter_cfg has filter_empty_gt=True" if leaves_out else "kept"
        return f"{summary}; {empty} of {len(images)} images have no objects of them ({effect})"

    def filter_data(self) -> list[dict[str, Any]]:
        """As mmdet's, but refuse an empty result."""
        kept = super().filter_data()
        if kept and (self.test_mode or any(info["instances"] for info in kept)):
            return kept
        boxes = sum(len(info["instances"]) for info in self.data_list)
        raise ValueError(
            f"no usable image is left in {self.ann_file!r}: {len(self.data_list)} images with "
            f"{boxes} boxes of the classes {', '.join(self._metainfo['classes'])} could be read, "
            f"of which filter_cfg={self.filter_cfg} leaves {len(kept)} images."
        )

    @abstractmethod
    def _read(self, problems: Problems) -> Iterator[dict[str, Any]]:
        """Images; width and height may be None; instances are (instance, its text)."""

    def _with_sizes(
        self, images: list[dict[str, Any]], problems: Problems
    ) -> Iterator[dict[str, Any]]:
        """Leave out images that are missing, are none, or have another size than is annotated.

        Files that are not local are not read.
        """
        is_local = self.backend_args is None and "://" not in self.ann_file
        for info in images:
            path, annotated = info["img_path"], (info["width"], info["height"])
            if is_local:
                try:
                    size = image_size(path)
                except FileNotFoundError:
                    problems.add(Kind.MISSING_IMAGE, path)
                    continue
                except ValueError as error:
                    problems.add(Kind.BROKEN_IMAGE, f"{path} ({error})")
                    continue
                if None not in annotated and annotated != size:
                    sizes = ("{} x {}".format(*sides) for sides in (annotated, size))
                    problems.add(Kind.WRONG_SIZE, f"{path}: {' instead of '.join(sizes)}")
                    continue
                info["width"], info["height"] = size
            elif None in annotated:
                problems.add(Kind.NO_SIZE, f"{path}, which is not local")
                continue
            yield info

    def _checked(self, info: dict[str, Any], problems: Problems) -> Iterator[dict[str, Any]]:
        """The instances of an image whose boxes can be used."""
        for instance, text in info["instances"]:
            box, kind = check_box(instance["bbox"], (info["width"], info["height"]))
            if kind is not None:
                problems.add(
                    kind, f"{info['img_path']} ({info['width']} x {info['height']}): {text}"
                )
            if box is not None:
                instance["bbox"] = list(box)
                yield instance


@DATASETS.register_module()
class VOCFormatDataset(_Checked, XMLDataset):
    """Any data set in Pascal VOC's layout: mmdet's XMLDataset, checked.

    Images are found with any usual extension; a missing size is read from the image.
    """

    image_prefix = "sub_data_root"

    def _read(self, problems: Problems) -> Iterator[dict[str, Any]]:
        self.cat2label = {name: label for label, name in enumerate(self._metainfo["classes"])}
        seen: set[str] = set()
        for name in names_of_split(self.ann_file, self.backend_args):
            if name in seen:
                problems.add(Kind.DUPLICATE, f"{self.ann_file}: {name}")
            else:
                seen.add(name)
                yield from self._read_image(name, problems)

    def _read_image(self, name: str, problems: Problems) -> Iterator[dict[str, Any]]:
        xml_path = osp.join(self.sub_data_root, self.ann_subdir, f"{name}.xml")
        try:
            with get_local_path(xml_path, backend_args=self.backend_args) as path:
                size, objects = read_voc(path)
        except FileNotFoundError:
            problems.add(Kind.MISSING_ANNOTATION, xml_path)
            return
        except ValueError as error:
            problems.add(Kind.BROKEN_ANNOTATION, f"{xml_path} ({error})")
            return
        yield {
            "img_id": name,
            "img_path": find_image(osp.join(self.sub_data_root, self.img_subdir), name),
            "xml_path": xml_path,
            "width": size and size[0],
            "height": size and size[1],
            "instances": list(self._instances(xml_path, objects, problems)),
        }

    def _instances(
        self, xml_path: str, objects: Sequence[VOCObject | str], problems: Problems
    ) -> Iterator[tuple[dict[str, Any], str]]:
        for number, item in enumerate(objects, start=1):
            where = f"object {number}"
            if isinstance(item, str):
                problems.add(Kind.MALFORMED, f"{xml_path}: {where}: {item}")
                continue
            if item.name not in self.cat2label:
                problems.add(Kind.UNKNOWN_CLASS, f"{xml_path}: {where}: {item.name!r}")
                continue
            box = [int(value) - 1 for value in item.box]
            least = self.bbox_min_size or 0
            is_small = box[2] - box[0] < least or box[3] - box[1] < least
            instance = {
                "bbox": box,
                "bbox_label": self.cat2label[item.name],
                "ignore_flag": int(item.is_difficult or is_small),
            }
            corners = ", ".join(f"{value:g}" for value in item.box)
            yield instance, f"{where}, {item.name} ({corners})"


@DATASETS.register_module()
class CheckedVOCDataset(VOCFormatDataset, VOCDataset):
    """mmdet's VOCDataset (PASCAL VOC, 20 classes), checked."""


@DATASETS.register_module()
class COCOFormatDataset(_Checked, CocoDataset):
    """Any data set in COCO's layout: mmdet's CocoDataset, checked.

    Labels follow the order of ``classes``, whatever the order of the file's categories.
    """

    METAINFO: dict[str, Any] = {}
    image_prefix = "img"

    def _read(self, problems: Problems) -> Iterator[dict[str, Any]]:
        with get_local_path(self.ann_file, backend_args=self.backend_args) as path:
            data = read_coco(path)
        self.cat_ids = category_ids(data, self._metainfo["classes"], self.ann_file)
        self.cat2label = {cat_id: label for label, cat_id in enumerate(self.cat_ids)}
        names = {category["id"]: category["name"] for category in data["categories"]}

        def report(kind: Kind, where: str) -> None:
            problems.add(kind, f"{self.ann_file}: {where}")

        images = {image["id"]: image for image in usable(data["images"], Image, report)}
        self.cat_img_map: dict[int, list[Any]] = defaultdict(list)
        instances = defaultdict(list)
        for annotation in usable(data["annotations"], Annotation, report):
            category, image = annotation["category_id"], images.get(annotation["image_id"])
            where = f"{self.ann_file}: annotation {annotation['id']}"
            if image is None:
                problems.add(Kind.ORPHAN, f"{where} of image {annotation['image_id']}")
                continue
            where += f" of {image['file_name']}"
            if category not in names:
                problems.add(Kind.MALFORMED, f"{where}: category_id={category!r} is in no category")
            elif category not in self.cat2label:
                problems.add(Kind.UNKNOWN_CLASS, f"{where}: {names[category]!r}")
            elif not annotation.get("ignore", False):
                text = f"annotation {annotation['id']}, {names[category]} {annotation['bbox']}"
                instances[image["id"]].append((self._instance(annotation), text))
        for image in images.values():
            sides = {side: image.get(side) or None for side in ("width", "height")}
            if None in sides.values():
                problems.add(Kind.NO_SIZE, f"{self.ann_file}: image {image['id']}")
                sides = dict.fromkeys(sides)
            raw = {**image, **sides, "img_id": image["id"]}
            info = super().parse_data_info({"raw_img_info": raw, "raw_ann_info": []})
            yield {**info, "instances": instances[image["id"]]}

    def _checked(self, info: dict[str, Any], problems: Problems) -> Iterator[dict[str, Any]]:
        for instance in super()._checked(info, problems):
            self.cat_img_map[self.cat_ids[instance["bbox_label"]]].append(info["img_id"])
            yield instance

    def _instance(self, annotation: dict[str, Any]) -> dict[str, Any]:
        x, y, width, height = annotation["bbox"]
        if (annotation["area"] if annotation.get("area") is not None else 1) <= 0:
            width = height = 0
        instance = {
            "bbox": (x, y, x + width, y + height),
            "bbox_label": self.cat2label[annotation["category_id"]],
            "ignore_flag": int(annotation.get("iscrowd") or 0),
        }
        if annotation.get("segmentation"):
            instance["mask"] = annotation["segmentation"]
        return instance


@DATASETS.register_module()
class CheckedCocoDataset(COCOFormatDataset):
    """mmdet's CocoDataset (COCO, 80 classes), checked."""

    METAINFO = CocoDataset.METAINFO
