"""The names of a data set's classes: read from its annotations, given to the heads, compared."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import nn

from fst.detection.annotations import read_coco, read_voc

# modules whose num_classes are not the data set's
_OTHER_CLASSES = ("RPNHead", "FusedSemanticHead", "VGG", "SSDVGG")


def classes_of(dataset: Mapping[str, Any], layout: str) -> list[str]:
    """The classes in the annotations of a data set's config.

    Args:
        dataset: The config, with `ann_file`, and `data_root` and `data_prefix` where needed.
        layout: "voc": all names that occur, sorted; "coco": the categories in file order.

    Raises:
        FileNotFoundError: the annotation file is missing.
        ValueError: it holds no classes.
    """
    root = dataset.get("data_root") or ""
    path = osp.join(root, dataset["ann_file"])
    if not osp.isfile(path):
        raise FileNotFoundError(f"classes='auto': annotation file {path!r} does not exist")
    if layout == "coco":
        return [str(category["name"]) for category in read_coco(path)["categories"]]
    prefix = dataset.get("data_prefix", {}).get("sub_data_root", "")
    folder = osp.join(root, prefix, dataset.get("ann_subdir", "Annotations"))
    with open(path, encoding="utf-8") as file:
        files = [osp.join(folder, f"{line.strip()}.xml") for line in file if line.strip()]
    names = sorted({name for file in files for name in _names(file)})
    if not names:
        raise ValueError(f"classes='auto': no object in the annotations listed in {path!r}")
    return names


def _names(path: str) -> Iterator[str]:
    """Names of one file's objects; what is wrong with the file is told when the data is built."""
    try:
        objects = read_voc(path)[1]
    except (FileNotFoundError, ValueError):
        return
    yield from (item.name for item in objects if not isinstance(item, str))


def set_num_classes(model: Any, count: int) -> None:
    """Sets `num_classes` wherever a head in a model's config states it."""
    if isinstance(model, dict):
        if "num_classes" in model and str(model.get("type")).endswith("Head"):
            if model["type"].rpartition(".")[2] not in _OTHER_CLASSES:
                model["num_classes"] = count
        model = list(model.values())
    if isinstance(model, (list, tuple)):
        for part in model:
            set_num_classes(part, count)


def check_heads(model: nn.Module, classes: Sequence[str]) -> None:
    """Raises ValueError if a head tells apart another number of classes than there are."""
    for name, module in model.named_modules():
        count = getattr(module, "num_classes", None)
        if isinstance(count, int) and count != len(classes):
            if type(module).__name__ not in _OTHER_CLASSES:
                raise ValueError(
                    f"{name} ({type(module).__name__}) has num_classes={count}, but the data set "
                    f"has {len(classes)} classes ({', '.join(classes)}): set num_classes, or "
                    "`classes` in the config, which sets it in every head"
                )


@HOOKS.register_module()
class ClassCheckHook(Hook):
    """Before anything is trained or evaluated, compares the classes of all data with the heads."""

    def before_train(self, runner: Any) -> None:
        """Checks training data against the heads, and validation data against training data."""
        loops = [runner.train_loop] + ([runner.val_loop] if runner.val_loop else [])
        self._check(runner, *loops)

    def before_test(self, runner: Any) -> None:
        """Checks test data against the heads."""
        self._check(runner, runner.test_loop)

    def before_val(self, runner: Any) -> None:
        """Checks validation data against the heads."""
        self._check(runner, runner.val_loop)

    @staticmethod
    def _check(runner: Any, *loops: Any) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        metas = [getattr(loop.dataloader.dataset, "metainfo", {}) for loop in loops]
        names = [tuple(meta["classes"]) for meta in metas if meta.get("classes")]
        for classes in names:
            check_heads(model, classes)
            if classes != names[0]:
                raise ValueError(
                    f"training data has the classes {names[0]}, validation data {classes}: "
                    "labels would mean different things"
                )
