"""The names of a data set's classes: read from its annotations, given to the heads, compared."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from torch import nn

from fst.checkpoint import trained_classes
from fst.detection.annotations import read_coco, read_voc, split_name

# modules whose num_classes are not the data set's
_OTHER_CLASSES = ("RPNHead", "FusedSemanticHead", "VGG", "SSDVGG")


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

    def xml_path(name: str) -> str:
        return osp.join(folder, f"{name}.xml")

    images = [split_name(line, lambda name: osp.isfile(xml_path(name))) for line in lines]
    files = [xml_path(name) for name in images if name]
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


def check_heads(model: nn.Module, classes: Sequence[str]) -> None:
    """Raise ValueError if a head tells apart another number of classes than there are."""
    for name, module in model.named_modules():
        count = getattr(module, "num_classes", None)
        if isinstance(count, int) and count != len(classes):
            if type(module).__name__ not in _OTHER_CLASSES:
                raise ValueError(
                    f"{name} ({type(module).__name__}) has num_classes={count}, but the data set "
                    f"has {len(classes)} classes ({', '.join(classes)}): set num_classes, or "
                    "`classes` in the config, which sets it in every head."
                )


@HOOKS.register_module()
class ClassCheckHook(Hook):
    """A comparison of the classes of data, heads and checkpoint, before training or testing."""

    def before_train(self, runner: Any) -> None:
        """Check training data against the heads, and validation data against training data."""
        self._check(runner)

    def before_val(self, runner: Any) -> None:
        """Check validation data against the heads."""
        self._check(runner)

    def before_test(self, runner: Any) -> None:
        """Check test data against the heads."""
        self._check(runner)

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

    @staticmethod
    def _check(runner: Any) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        found = _classes_of_loops(_built_loops(runner))
        for classes in found.values():
            check_heads(model, classes)
        if len(set(found.values())) > 1:
            lists = "; ".join(f"{name}: {', '.join(names)}" for name, names in found.items())
            raise ValueError(f"the data sets have different classes, so labels differ: {lists}.")


def _built_loops(runner: Any) -> dict[str, BaseLoop]:
    loops = {name: getattr(runner, f"_{name}_loop") for name in ("train", "val", "test")}
    return {name: loop for name, loop in loops.items() if isinstance(loop, BaseLoop)}


def _classes_of_loops(loops: Mapping[str, BaseLoop]) -> dict[str, tuple[str, ...]]:
    metas = {n: getattr(loop.dataloader.dataset, "metainfo", None) for n, loop in loops.items()}
    return {n: tuple(meta["classes"]) for n, meta in metas.items() if meta and meta.get("classes")}
