"""`data_root` of a classifier's config: one folder for its data sets, whose classes are counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from fst.files.checkpoint import load_checkpoint_safely, trained_classes
from fst.training.engine.data.folder import ImageFolder, class_folders

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
EVALUATORS = ("val_evaluator", "test_evaluator")


def prepare(
    config: Config,
    datasets: Mapping[str, Sequence[Any]],
    trained: Sequence[str] = (),
    options: Collection[str] = (),
) -> None:
    """Apply ``data_root`` to a classifier's config, in place.

    - Every ImageFolder without a ``data_root`` of its own takes it.
    - The model gets as many outputs as there are classes.
    - Accuracy keeps the top-k whose k is no larger than that.

    Args:
        config: The whole config.
        datasets: Of each dataloader its data sets and their wrappers.
        trained: The classes of a checkpoint that will be used, which are counted; without them
            the folders of the training data are.
        options: Names of the keys that the command line has set.

    Raises:
        ValueError: ``options`` set ``data_root``, and every data set has one of its own.
    """
    root = config.get("data_root")
    if root is None:
        return
    every = (dataset for group in datasets.values() for dataset in group)
    folders = [d for d in every if d.get("type") in ("ImageFolder", ImageFolder)]
    if rootless := share_data_root(root, folders, options):
        counted = trained or class_folders(root, rootless[0].get("split"))
        _set_num_classes(config, len(counted))


def share_data_root(root: str, datasets: Sequence[Any], options: Collection[str]) -> list[Any]:
    """Give ``root`` to those of the data sets that have no data_root of their own.

    Raises:
        ValueError: ``options`` set ``data_root``, and every data set has another one.
    """
    rootless = [dataset for dataset in datasets if "data_root" not in dataset]
    if "data_root" in options and all(d.get("data_root", root) != root for d in datasets):
        raise ValueError(
            f"data_root={root!r} changes nothing: every data set of the config that takes one has "
            "its own; change train_dataloader.dataset.data_root and so on."
        )
    for dataset in rootless:
        dataset["data_root"] = root
    return rootless


def datasets_of(config: Config) -> dict[str, list[Any]]:
    """Of each dataloader of a config its data sets, and those within wrappers."""
    return {
        name: list(datasets_within((config.get(name) or {}).get("dataset"))) for name in LOADERS
    }


def datasets_within(dataset: Any) -> Iterator[Any]:
    """A data set's config, and those within wrappers such as mmengine's RepeatDataset."""
    if isinstance(dataset, dict):
        yield dataset
        yield from datasets_within(dataset.get("dataset"))
        for part in dataset.get("datasets", ()):
            yield from datasets_within(part)


def classes_of_checkpoint(path: str | None) -> list[str]:
    """The names of the classes that a checkpoint has; empty if it names none or is not there."""
    if path is None or not Path(path).is_file():
        return []
    return trained_classes(load_checkpoint_safely(path))


def _set_num_classes(config: Config, count: int) -> None:
    architecture = config.model.get("architecture")
    if not count or not isinstance(architecture, dict):
        return
    architecture["num_classes"] = count
    for name in EVALUATORS:
        metric = config.get(name)
        if isinstance(metric, dict) and isinstance(topk := metric.get("topk"), list | tuple):
            metric["topk"] = tuple(k for k in topk if k <= count) or (1,)
