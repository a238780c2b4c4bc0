"""The data sets of timm's factory: image folders, torchvision's, Hugging Face's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.registry import DATASETS
from PIL import Image
from timm.data import ImageDataset as TimmReading
from timm.data import create_dataset
from timm.data.dataset_factory import _EVAL_SYNONYM, _TRAIN_SYNONYM

from fst.basics.extras import extra_named
from fst.basics.text import suggest
from fst.engine.data.base import ImageDataset
from fst.engine.data.transforms import Transforms


@DATASETS.register_module()
class TimmDataset(ImageDataset):
    """A data set of `timm.data.create_dataset` whose images are reached by their index.

    Args:
        root: The folder with the data; of "hfds/" the folder of the cache.
        name: "" for a folder of class folders or a .tar of them at ``root``, "torch/NAME" for one
            of torchvision's (cifar10, cifar100, mnist, ...), "hfds/NAME" for one of Hugging Face,
            by its name on the hub or by a local path ("hfds//data/flowers").
        split: "train", "validation", or what the data set has. A folder is searched for a
            sub-folder of that name or its synonyms, as timm does; one that has none of any split is
            "train" as a whole.
        transforms: See `ImageFolder`.
        class_map: File or dict of class names to indices, of folders and "hfds/".
        input_key: Column of the images, of "hfds/".
        target_key: Column of the labels, of "hfds/".
        download: Let torchvision download what is missing, of "torch/".
    """

    def __init__(
        self,
        root: str | None = None,
        name: str = "",
        split: str = "train",
        transforms: Sequence[dict[str, Any]] = (),
        class_map: str | dict[str, int] | None = None,
        input_key: str | None = None,
        target_key: str | None = None,
        download: bool = False,
    ) -> None:
        self.check(root=root, name=name, split=split)
        columns = {"input_key": input_key, "target_key": target_key}
        options = {**columns, "class_map": class_map, "download": download or None}
        options = {option: value for option, value in options.items() if value is not None}
        kinds = {"torch": ["download"], "hfds": [*columns, "class_map"]}
        for option in options.keys() - kinds.get(name.partition("/")[0], ["class_map"]):
            raise ValueError(f"{option}={options[option]!r}: data sets of name={name!r} have none.")
        self.name = name or str(root)
        folder = None if root is None else str(Path(root).expanduser())
        self._source = create_dataset(name, root=folder, split=split, **options)
        self.classes = _classes(self._source)
        self.transforms = Transforms(transforms)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Raise if the kind of data set is unknown, its package missing, or its folder not there.

        Raises:
            FileNotFoundError: there is no folder.
            ModuleNotFoundError: the package that reads it is missing.
            ValueError: no data set of this kind has random access, or the folder no such split.
        """
        root, name = config.get("root"), config.get("name", "")
        _check_kind(name)
        needed = root if not name else name.partition("/")[2] if name.startswith("hfds//") else None
        if not name and root is None:
            raise ValueError("root=None: a data set without a name is a folder or a .tar; give it.")
        if needed is not None and not Path(needed).expanduser().exists():
            raise FileNotFoundError(f"no data at {str(needed)!r} (root={root!r}, name={name!r}).")
        if not name and Path(str(root)).expanduser().is_dir():
            _check_split(Path(str(root)).expanduser(), config.get("split", "train"))

    def __len__(self) -> int:
        return len(self._source)

    def load(
        self, indices: Sequence[int], epoch: int, keys: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read, decode and transform the images; their labels come with them."""
        labels: list[int] = []
        readers = [partial(self._read, index, labels) for index in indices]
        images = self.transforms.batch(readers, epoch, keys, f"TimmDataset({self.name!r})")
        return images, torch.tensor(labels)

    def _read(self, index: int, labels: list[int]) -> Image.Image:
        if not isinstance(self._source, TimmReading):  # of torchvision
            image, label = self._source[index]
        else:  # timm's own access puts another image in the place of one that is broken
            file, label = self._source.reader[index]
            with file, Image.open(file) as image:
                image.load()
        labels.append(label)
        return image


def _check_kind(name: str) -> None:
    kind = name.partition("/")[0]
    if name and ("/" not in name or kind not in ("torch", "hfds")):
        raise ValueError(f"name={name!r} is unknown.{suggest(name, ('torch/', 'hfds/'))}")
    if kind == "hfds":
        with extra_named():
            importlib.import_module("datasets")


def _check_split(root: Path, split: str) -> None:
    """Refuse a split that timm would not find, and take the whole folder for."""
    found = {entry.name for entry in root.iterdir() if entry.is_dir()}
    synonyms = next((s for s in map(set, (_TRAIN_SYNONYM, _EVAL_SYNONYM)) if split in s), {split})
    is_whole = split == "train" and not found & set(_EVAL_SYNONYM)
    if not found & synonyms and not is_whole:
        raise ValueError(
            f"split={split!r}: {str(root)!r} has no folder {' or '.join(sorted(synonyms))}, but "
            f"{', '.join(sorted(found)[:5])}{', ...' if len(found) > 5 else ''}."
        )


def _classes(source: Any) -> tuple[str, ...]:
    """Class names by index; () where the source has none."""
    source = getattr(source, "reader", source)
    named = (getattr(source, name, None) for name in ("class_to_idx", "class_name_to_idx"))
    indices = next((found for found in named if found), {})
    return tuple(str(name) for name, _ in sorted(indices.items(), key=lambda item: item[1]))
