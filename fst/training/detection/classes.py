"""The names of a data set's classes: read from its annotations, given to the heads."""

from __future__ import annotations

import os.path as osp
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from fst.training.detection.annotations import classes_in_xml, names_of_split, read_coco

_OTHER_CLASSES = ("RPNHead", "FusedSemanticHead")  # whose num_classes are not the data set's


def classes_of(dataset: Mapping[str, Any], layout: str) -> list[str]:
    """The classes in the annotations of a data set's config.

    Args:
        dataset: The config, with ``ann_file``, and ``data_root`` and ``data_prefix`` where needed.
        layout: "voc": all names that occur, sorted; "coco": the categories in file order.

    Raises:
        FileNotFoundError: the annotation file is missing.
        ValueError: it holds no classes.
    """
    root = dataset.get("data_root") or ""
    path = osp.join(root, dataset["ann_file"])
    if not osp.isfile(path):
        raise FileNotFoundError(
            f"classes='auto': annotation file {path!r} does not exist; set data_root to the folder "
            "of the data set, or train_dataloader.dataset.ann_file to its file there."
        )
    if layout == "coco":
        return [str(category["name"]) for category in read_coco(path)["categories"]]
    prefix = dataset.get("data_prefix", {}).get("sub_data_root", "")
    folder = osp.join(root, prefix, dataset.get("ann_subdir", "Annotations"))
    names: set[str] = set()
    for name in names_of_split(path):
        try:
            names |= classes_in_xml(osp.join(folder, f"{name}.xml"))
        except (LookupError, OSError, ET.ParseError):
            continue  # it is reported when the data set is built
    if not names:
        raise ValueError(f"classes='auto': no object in the annotations listed in {path!r}.")
    return sorted(names)


def set_num_classes(model: Any, count: int) -> None:
    """Set ``num_classes`` wherever a head in a model's config states it."""
    if isinstance(model, dict):
        if "num_classes" in model and str(model.get("type")).endswith("Head"):
            if model["type"].rpartition(".")[2] not in _OTHER_CLASSES:
                model["num_classes"] = count
        model = list(model.values())
    if isinstance(model, (list, tuple)):
        for part in model:
            set_num_classes(part, count)
