"""Prepares a detector's config for `fst train`: checked data sets, classes, the check of heads."""

from __future__ import annotations

import json
import os.path as osp
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fst.training.detection.data import classes_in_xml
from fst.training.engine.data_root import EVALUATORS, share_data_root

CHECKED = {
    "VOCDataset": "CheckedVOCDataset",
    "XMLDataset": "CheckedXMLDataset",
    "CocoDataset": "CheckedCocoDataset",
}
LAYOUTS = {
    **dict.fromkeys(("CheckedVOCDataset", "CheckedXMLDataset"), "voc"),
    "CheckedCocoDataset": "coco",
}
_OTHER_CLASSES = ("RPNHead", "FusedSemanticHead")  # whose num_classes are not the data set's


def prepare(
    config: Any,
    datasets: Mapping[str, Sequence[Any]],
    trained: Sequence[str] = (),
    options: Collection[str] = (),
) -> None:
    """Apply ``classes``, ``bad_annotations`` and ``data_root`` of a detector's config, in place.

    - Data sets of mmdet's VOC and COCO types become fst's checked ones, with ``bad_annotations``.
    - ``data_root`` goes to those that have none of their own.
    - ``classes`` ("auto" or names) goes to all data sets and all heads.
    - A CocoMetric without ``ann_file`` takes that of the data it evaluates.

    Args:
        config: mmengine's Config.
        datasets: Of each dataloader its data sets and their wrappers.
        trained: The classes of a checkpoint that will be used, which "auto" means.
        options: Names of the keys that the command line has set.

    Raises:
        FileNotFoundError: the annotations that "auto" reads are missing.
        ValueError: one of the keys is wrong, or would change nothing.
    """
    datasets = {
        name: [d for d in group if not d.keys() & {"dataset", "datasets"}]
        for name, group in datasets.items()
    }
    every = [dataset for group in datasets.values() for dataset in group]
    for dataset in every:
        if _kind(dataset) in CHECKED:
            dataset["type"] = CHECKED[_kind(dataset)]
    checked = [dataset for dataset in every if _kind(dataset) in LAYOUTS]
    for dataset in checked:
        dataset.setdefault("bad_annotations", config.get("bad_annotations", "error"))
    if "bad_annotations" in config and not checked:
        raise ValueError("bad_annotations: no data set of the config is in VOC or COCO format.")
    if config.get("data_root") is not None:
        share_data_root(config.data_root, every, options)
    _set_classes(config, datasets, trained)
    for name in EVALUATORS:
        _complete_evaluators(config.get(name), datasets[name.replace("evaluator", "dataloader")])
    hooks = list(config.get("custom_hooks") or ())
    if "NumClassCheckHook" not in map(_kind, hooks):
        config.custom_hooks = [*hooks, {"type": "NumClassCheckHook"}]


def _kind(config: Any) -> str:
    kind = config.get("type") if isinstance(config, dict) else type(config)
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rpartition(".")[2]


def _set_classes(config: Any, datasets: dict[str, list[Any]], trained: Sequence[str]) -> None:
    classes = config.get("classes")
    if classes is None:
        return
    if classes == "auto":
        classes = list(trained) or _classes_of_data(datasets)
    is_list = isinstance(classes, (list, tuple)) and classes
    if not is_list or not all(isinstance(name, str) and name for name in classes):
        raise ValueError(f"classes={classes!r} must be 'auto' or a list of names.")
    if len(set(classes)) < len(classes):
        raise ValueError(f"classes={list(classes)!r} has a name twice.")
    config.classes = list(classes)
    for group in datasets.values():
        for dataset in group:
            dataset["metainfo"] = {**(dataset.get("metainfo") or {}), "classes": tuple(classes)}
    set_num_classes(config.model, len(classes))


def _classes_of_data(datasets: dict[str, list[Any]]) -> list[str]:
    names: list[str] = []
    for dataset in datasets["train_dataloader"]:
        layout = LAYOUTS.get(_kind(dataset))
        if layout is None:
            raise ValueError(
                f"classes='auto' reads data in VOC or COCO format, not {_kind(dataset)}: "
                "give a list of names."
            )
        names += classes_of(dataset, layout)
    if not names:
        raise ValueError("classes='auto' needs a train_dataloader: give a list of names.")
    return list(dict.fromkeys(names))


def _complete_evaluators(evaluator: Any, datasets: list[Any]) -> None:
    for metric in evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]:
        is_coco = isinstance(metric, dict) and _kind(metric) == "CocoMetric"
        if is_coco and not metric.get("ann_file") and len(datasets) == 1:
            root = datasets[0].get("data_root") or ""
            metric["ann_file"] = osp.join(root, datasets[0]["ann_file"])


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
