"""ImageNet and any other folder with one sub-folder of images per class."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from torchvision.datasets.folder import find_classes

from fst.training.engine.data.base import ImageDataset, balanced_subset
from fst.training.engine.data.images import faults, opened
from fst.training.engine.data.transforms import Transforms

NAMED = 20  # classes whose images are counted one by one in the log
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


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
        self.classes = tuple(find_classes(str(self.root))[0])
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in _images_below(self.root / name)
        ]
        if skip_broken:
            found = self._whole(found)
        labels = torch.tensor([label for _, label in found])
        empty = sorted(set(range(len(self.classes))) - set(labels.tolist()))
        if empty:
            raise FileNotFoundError(
                f"{str(self.root)!r} has no image of {', '.join(self.classes[i] for i in empty)}: "
                f"expected <class>/<image> with one of the extensions {', '.join(EXTENSIONS)}."
            )
        rows = torch.arange(len(found))
        if subset is not None or skip:
            rows = balanced_subset(labels, subset, skip)
        self.paths = [found[row][0] for row in rows.tolist()]
        self.labels = labels[rows]
        self.transforms = Transforms(transforms)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Raise FileNotFoundError unless the folder is there, ValueError if it has no images."""
        root = _root(config.get("data_root", ""), config.get("split"))
        if not root.is_dir():
            raise FileNotFoundError(
                f"no image folder at {str(root)!r} (data_root={config.get('data_root')!r}, "
                f"split={config.get('split')!r}): expected <class>/<image> in it. Your own images: "
                "sort them into data_root/train/<class>/ and data_root/val/<class>/. ImageNet: get "
                "ILSVRC2012 from https://image-net.org/download.php, sorted likewise."
            )
        if not any(True for entry in root.iterdir() for _ in _images_below(entry)):
            raise ValueError(
                f"data_root={str(root)!r} holds no images: expected {root}/<class>/<image> with "
                f"one of the extensions {', '.join(EXTENSIONS)}."
            )

    @classmethod
    def check_images(cls, **config: Any) -> None:
        """Raise ValueError, with its name, if the header of an image cannot be read."""
        if config.get("skip_broken"):
            return
        root = _root(config["data_root"], config.get("split"))
        paths = [path for entry in sorted(root.iterdir()) for path in _images_below(entry)]
        found = list(faults(paths, str(root)).values())
        if found:
            others = f" And {len(found) - 1} more." if len(found) > 1 else ""
            raise ValueError(f"{found[0]}{others} --skip-broken leaves such images out.")

    def _whole(self, found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        broken = faults([path for path, _ in found], str(self.root))
        if broken:
            first = next(iter(broken.values()))
            message = f"{self.root}: {len(broken)} of {len(found)} images left out. {first}"
            print_log(message, logger="current", level=logging.WARNING)
        return [(path, label) for path, label in found if path not in broken]

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
        source = f"ImageFolder({self.paths[indices[0]]!r}, ...)"
        return self.transforms.batch(readers, epoch, keys, source)


def class_folders(data_root: str, split: str | None = None) -> tuple[str, ...]:
    """Names of the classes, sorted: the sub-folders of ``data_root[/split]``, if it is a folder."""
    root = _root(data_root, split)
    entries = root.iterdir() if root.is_dir() else ()
    return tuple(sorted(entry.name for entry in entries if entry.is_dir()))


def _images_below(folder: Path) -> Iterator[str]:
    """Sorted paths; what links lead to more than once counts once, a link to a parent never."""
    seen = set(map(str, Path(os.path.realpath(folder)).parents))
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        found.append((parent, names))
    for parent, names in sorted(found):
        for name in sorted(names):
            if name.lower().endswith(EXTENSIONS):
                yield os.path.join(parent, name)


def _root(data_root: str, split: str | None) -> Path:
    return Path(data_root).expanduser() / (split or "")
