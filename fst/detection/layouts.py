"""Where the annotations and images of a split lie, in the layouts that people have."""

from __future__ import annotations

import os.path as osp
from typing import Any

from fst.detection.annotations import read_coco

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
COCO_FILES = (
    "{split}.json",
    "annotations/{split}.json",
    "annotations/instances_{split}.json",
    "annotations/instances_{split}2017.json",
    "{split}/_annotations.coco.json",
    "{split}/annotations.json",
)
COCO_IMAGES = ("{split}", "{split}2017", "images/{split}", "images", "JPEGImages", "")
VOC_FOLDERS = ("", "VOC2007", "VOC2012", "VOCdevkit/VOC2007", "VOCdevkit/VOC2012")
VOC_IMAGES = ("JPEGImages", "images", "Images")
VOC_ANNOTATIONS = ("Annotations", "annotations")


def find_split(dataset: Any, split: str, layout: str) -> None:
    """Point a data set's config to the files of its split, if its own ``ann_file`` does not exist.

    Args:
        dataset: The config, with ``data_root``; changed in place where another layout is found.
        split: "train", "val" or "test".
        layout: "voc" or "coco".
    """
    root = dataset.get("data_root") or ""
    if "://" in root or osp.isfile(osp.join(root, dataset.get("ann_file") or "")):
        return
    for name in SPLITS[split]:
        found = _voc(root, name) if layout == "voc" else _coco(root, name)
        if found is not None:
            dataset.update(found)
            return


def _voc(root: str, split: str) -> dict[str, Any] | None:
    for folder in VOC_FOLDERS:
        file = osp.join(folder, "ImageSets", "Main", f"{split}.txt")
        if osp.isfile(osp.join(root, file)):
            base = osp.join(root, folder)
            return {
                "ann_file": file,
                "data_prefix": {"sub_data_root": folder},
                "img_subdir": _folder(base, VOC_IMAGES),
                "ann_subdir": _folder(base, VOC_ANNOTATIONS),
            }
    return None


def _folder(base: str, names: tuple[str, ...]) -> str:
    return next((name for name in names if osp.isdir(osp.join(base, name))), names[0])


def _coco(root: str, split: str) -> dict[str, Any] | None:
    for pattern in COCO_FILES:
        file = pattern.format(split=split)
        if osp.isfile(osp.join(root, file)):
            return {"ann_file": file, "data_prefix": {"img": _image_folder(root, file, split)}}
    return None


def _image_folder(root: str, file: str, split: str) -> str:
    """The folder that holds the first image of an annotation file; "" where none does."""
    entry = read_coco(osp.join(root, file))["images"][0]
    first = str(entry.get("file_name", "")) if isinstance(entry, dict) else ""
    folders = [osp.dirname(file), *(folder.format(split=split) for folder in COCO_IMAGES)]
    return next((f for f in folders if osp.isfile(osp.join(root, f, first))), "")
