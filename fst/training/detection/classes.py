"""The names of a data set's classes: read from its annotations, given to the heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fst.training.detection.data import classes_in_xml

_OTHER_CLASSES = ("RPNHead", "FusedSemanticHead")  # whose num_classes are not the data set's


def classes_of(dataset: Mapping[str, Any], layout: str) -> list[str]:
    """The classes in the annotations of a data set's config.

    Args:
        dataset: The config, with ``ann_file``, and ``data_root`` and ``data_prefix`` where needed.
        layout: "voc": all names that occur, sorted; "coco": the categories in file order.

    Raises:
        FileNotFoundError: the annotation file is missing.
        ValueError: it is no such file, or holds no classes.
    """
    root = dataset.get("data_root") or ""
    path = Path(root, dataset["ann_file"])
    if not path.is_file():
        raise FileNotFoundError(
            f"classes='auto': annotation file {str(path)!r} does not exist; set data_root to the "
            "folder of the data set, or train_dataloader.dataset.ann_file to its file there."
        )
    if layout == "coco":
        try:
            names = [str(entry["name"]) for entry in json.loads(path.read_bytes())["categories"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no annotation file of COCO: {error!r}.") from error
    else:
        prefix = (dataset.get("data_prefix") or {}).get("sub_data_root", "")
        folder = Path(root, prefix, dataset.get("ann_subdir", "Annotations"))
        files = (folder / f"{name}.xml" for name in path.read_text().split())
        names = sorted(set().union(*(classes_in_xml(file) for file in files)))
    if not names:
        raise ValueError(f"classes='auto': no class in the annotations of {str(path)!r}.")
    return names


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
