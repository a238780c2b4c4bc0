"""The annotations and images of a split in Pascal VOC's and COCO's own layouts."""

from __future__ import annotations

import os.path as osp
from typing import Any

SPLITS = {"train": ("train",), "val": ("val",), "test": ("test", "val")}
VOC_FOLDERS = ("", "VOC2007/", "VOC2012/", "VOCdevkit/VOC2007/", "VOCdevkit/VOC2012/")
FILES = {  # annotation file, and what it changes of data_prefix
    "voc": [
        (f"{folder}ImageSets/Main/{{split}}.txt", {"sub_data_root": folder})
        for folder in VOC_FOLDERS
    ],
    "coco": [
        ("{split}.json", {}),
        ("annotations/instances_{split}2017.json", {"img": "{split}2017"}),
    ],
}


def find_split(dataset: Any, split: str, layout: str) -> None:
    """Point a data set's config to its split, where its own annotation file does not exist.

    Args:
        dataset: The config, with ``data_root``; changed in place if the split is found.
        split: "train", "val" or "test", for which "val" serves if there is no other.
        layout: "voc" or "coco".
    """
    root = dataset.get("data_root") or ""
    if "://" in root or osp.isfile(osp.join(root, dataset.get("ann_file") or "")):
        return
    for name in SPLITS[split]:
        for pattern, prefix in FILES[layout]:
            file = pattern.format(split=name)
            if osp.isfile(osp.join(root, file)):
                dataset["ann_file"] = file
                found = {key: folder.format(split=name) for key, folder in prefix.items()}
                dataset["data_prefix"] = {**(dataset.get("data_prefix") or {}), **found}
                return
