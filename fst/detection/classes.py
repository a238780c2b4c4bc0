"""The names of a data set's classes: read from its annotations, given to the heads, compared."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop

from fst.checkpoint import trained_classes
from fst.detection.annotations import read_coco, read_voc

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
            f"classes='auto': annotation file {path!r} does not exist, nor one of another known "
            "layout; set data_root to the folder of the data set, or link it there."
        )
    if layout == "coco":
        return [str(category["name"]) for category in read_coco(path)["categories"]]
    prefix = dataset.get("data_prefix", {}).get("sub_data_root", "")
    folder = osp.join(root, prefix, dataset.get("ann_subdir", "Annotations"))
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"split file {path!r} is no UTF-8: {error}.") from error

    files = [osp.join(folder, f"{line.strip()}.xml") for line in lines if line.strip()]
    names = sorted({name for file in files for name in _names(file)})
    if not names:
        raise ValueError(f"classes='auto': no object in the annotations listed in {path!r}.")
    return names


def _names(path: str) -> Iterator[str]:
    """Names of one file's objects; what is wrong with the file is told when the data is built."""
    try:
        objects = read_voc(path)[1]
    except (FileNotFoundError, ValueError):
        return
    yield from (item.name for item in objects if not isinstance(item, str))


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


@HOOKS.register_module()
class ClassCheckHook(Hook):
    """A comparison of the classes of data and checkpoint, before training or testing.

    mmdet's NumClassCheckHook compares the heads.
    """

    def before_train(self, runner: Any) -> None:
        """Check that validation data have the classes of the training data."""
        found = _classes_of_loops(_built_loops(runner))
        if len(set(found.values())) > 1:
            lists = "; ".join(f"{name}: {', '.join(names)}" for name, names in found.items())
            raise ValueError(f"the data sets have different classes, so labels differ: {lists}.")

    def after_load_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        """To resume or to test, checks that labels mean what they meant to the checkpoint."""
        loops = _built_loops(runner)
        known = tuple(trained_classes(checkpoint))
        if not known or ("train" in loops and not runner._resume):
            return
        for name, classes in _classes_of_loops(loops).items():
            if classes != known:
                raise ValueError(
                    f"the checkpoint was trained on the classes {', '.join(known)}; the {name} "
                    f"data has {', '.join(classes)}: set `classes` in the config to the former."
                )


def _built_loops(runner: Any) -> dict[str, BaseLoop]:
    loops = {name: getattr(runner, f"_{name}_loop") for name in ("train", "val", "test")}
    return {name: loop for name, loop in loops.items() if isinstance(loop, BaseLoop)}


def _classes_of_loops(loops: Mapping[str, BaseLoop]) -> dict[str, tuple[str, ...]]:
    metas = {n: getattr(loop.dataloader.dataset, "metainfo", None) for n, loop in loops.items()}
    return {n: tuple(meta["classes"]) for n, meta in metas.items() if meta and meta.get("classes")}
