"""ImageNet and any other folder with one sub-folder of images per class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from fst.training.engine.data.base import ImageDataset, balanced_subset
from fst.training.engine.data.images import faults, opened
from fst.training.engine.data.transforms import Transforms

NAMED = 20  # classes whose images are counted one by one in the log
EXTENSIONS = (*IMG_EXTENSIONS, ".gif")


@DATASETS.register_module()
class ImageFolder(ImageDataset):
    """Images in ``data_root[/split]/<class>/**``; classes are the sub-folders in sorted order.

    Args:
        data_root: The folder.
        split: Sub-folder of it, such as "train" or "val".
        transforms: Configs of torchvision's v2 transforms, such as
            ``dict(type="RandomResizedCrop", size=224)``, and of those in
            `fst.training.engine.data.transforms`. They must end with images of one size; conversion
            to uint8 tensors is added, normalisation is the preprocessor's.
        subset, skip: See `InMemoryDataset`.
        skip_broken: Leave out images whose header cannot be read, and count them in the log.
    """

    def __init__(
        self,
        data_root: str,
        split: str | None = None,
        transforms: Sequence[dict[str, Any]] = (),
        subset: int | None = None,
        skip: int = 0,
        skip_broken: bool = False,
    ) -> None:
        self.check(data_root=data_root, split=split)
        self.root = _root(data_root, split)
        self.classes, found = _listed(self.root)
        if skip_broken:
            found = self._whole(found)
        labels = torch.tensor([label for _, label in found])
        rows = balanced_subset(labels, subset, skip)
        self.paths = [found[row][0] for row in rows.tolist()]
        self.labels = labels[rows]
        self.transforms = Transforms(transforms)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Raise FileNotFoundError unless the folder is there."""
        root = _root(config.get("data_root", ""), config.get("split"))
        if not root.is_dir():
            raise FileNotFoundError(
                f"no image folder at {str(root)!r} (data_root={config.get('data_root')!r}, "
                f"split={config.get('split')!r}): expected <class>/<image> in it. Your own images: "
                "sort them into data_root/train/<class>/ and data_root/val/<class>/. ImageNet: get "
                "ILSVRC2012 from https://image-net.org/download.php, sorted the same way."
            )

    @classmethod
    def check_images(cls, **config: Any) -> None:
        """Raise ValueError, with its name, if the header of an image cannot be read."""
        root = _root(config["data_root"], config.get("split"))
        _, found = _listed(root)
        if config.get("skip_broken"):
            return
        broken = list(faults([path for path, _ in found], str(root)).values())
        if broken:
            others = f" And {len(broken) - 1} more." if len(broken) > 1 else ""
            raise ValueError(f"{broken[0]}{others} --skip-broken leaves such images out.")

    def _whole(self, found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        broken = faults([path for path, _ in found], str(self.root))
        if broken:
            first = next(iter(broken.values()))
            message = f"{self.root}: {len(broken)} of {len(found)} images left out. {first}"
            print_log(message, logger="current", level=logging.WARNING)
        whole = [(path, label) for path, label in found if path not in broken]
        if empty := set(range(len(self.classes))) - {label for _, label in whole}:
            names = ", ".join(self.classes[label] for label in sorted(empty))
            raise FileNotFoundError(f"{self.root}: no image of {names} can be read.")
        return whole

    def __str__(self) -> str:
        """Describe the data set: its folder, the number of images of each class, and their size."""
        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        of_each = ""
        if len(self.classes) <= NAMED:
            named = (f"{name} {n}" for name, n in zip(self.classes, counts, strict=True))
            of_each = f" ({', '.join(named)})"
        channels, height, width = self[0]["inputs"].shape
        return (
            f"{self.root}: {len(self)} images of {len(self.classes)} classes{of_each}, "
            f"{channels} x {height} x {width} after the transforms"
        )

    def load_images(self, indices: Sequence[int], epoch: int, keys: np.ndarray) -> torch.Tensor:
        """Read, decode and transform the images."""
        readers = [partial(opened, self.paths[index]) for index in indices]
        return self.transforms.batch(readers, epoch, keys, str(self.root))


def class_folders(data_root: str, split: str | None = None) -> list[str]:
    """Names of the classes, sorted: the sub-folders of ``data_root[/split]``, if it is a folder."""
    root = _root(data_root, split)
    return find_classes(str(root))[0] if root.is_dir() else []


def _listed(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The classes, and of each image the path and the number of its class, sorted."""
    try:
        classes, numbers = find_classes(str(root))
        return classes, make_dataset(str(root), numbers, EXTENSIONS)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{root}: {error}") from error


def _root(data_root: str, split: str | None) -> Path:
    return Path(data_root).expanduser() / (split or "")
