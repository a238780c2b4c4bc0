"""Where the annotations and images of a split lie, in the layouts that people have."""

from __future__ import annotations

import os.path as osp
from typing import Any

from fst.detection.annotations import read_coco

VALIDATION = ("val", "valid", "validation")
SPLITS = {"train": ("train",), "val": VALIDATION, "test": ("test", *VALIDATION)}
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
    """Point a data set's config to the files and folders of its split, where its own do not exist.

    Args:
        dataset: The config, with ``data_root``; changed in place where another layout is found.
        split: "train", "val" or "test".
        layout: "voc" or "coco".
    """
    root = dataset.get("data_root") or ""
    if "://" in root:
        return
    if osp.isfile(osp.join(root, dataset.get("ann_file") or "")):
        _find_folders(dataset, root, split, layout)
        return
    for name in SPLITS[split]:
        found = _voc(root, name) if layout == "voc" else _coco(root, name)
        if found is not None:
            dataset.update(found)
            return


def _find_folders(dataset: Any, root: str, split: str, layout: str) -> None:
    """Replace the folders of an existing ``ann_file`` that do not exist."""
    prefix = dataset.get("data_prefix") or {}
    if layout == "coco":
        if not osp.isdir(osp.join(root, prefix.get("img") or "")):
            folder = _image_folder(root, dataset["ann_file"], split, prefix["img"])
            dataset["data_prefix"] = {**prefix, "img": folder}
        return
    base = osp.join(root, prefix.get("sub_data_root") or "")
    for key, names in (("img_subdir", VOC_IMAGES), ("ann_subdir", VOC_ANNOTATIONS)):
        given = dataset.get(key) or names[0]
        if not osp.isdir(osp.join(base, given)):
            dataset[key] = _folder(base, (given, *names))


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


def _image_folder(root: str, file: str, split: str, otherwise: str = "") -> str:
    """The folder that holds the first image of an annotation file."""
    entry = read_coco(osp.join(root, file))["images"][0]
    first = str(entry.get("file_name", "")) if isinstance(entry, dict) else ""
    folders = [osp.dirname(file), *(folder.format(split=split) for folder in COCO_IMAGES)]
    return next((f for f in folders if osp.isfile(osp.join(root, f, first))), otherwise)
