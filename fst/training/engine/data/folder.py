"""ImageNet and any other folder with one sub-folder of images per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.registry import DATASETS
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from fst.training.engine.data.base import ImageDataset, balanced_subset

NAMED = 20  # classes whose images are counted one by one in the log
EXTENSIONS = (*IMG_EXTENSIONS, ".gif")
UNSCALED = ("I", "F")  # modes of 32 bits, whose largest value no file names


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
    """

    def __init__(
        self,
        data_root: str,
        split: str | None = None,
        transforms: Sequence[dict[str, Any]] = (),
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.root = _root(data_root, split)
        classes, found = _listed(self.root)
        labels = torch.tensor([label for _, label in found])
        rows = balanced_subset(labels, subset, skip)
        super().__init__(labels[rows], classes, transforms)
        self.paths = [found[row][0] for row in rows.tolist()]

    @classmethod
    def check(cls, **config: Any) -> None:
        """Read the headers of all images.

        Raises:
            FileNotFoundError: there is no such folder, or a class without images.
            ValueError: an image cannot be read.
        """
        _, found = _listed(_root(config.get("data_root", ""), config.get("split")))
        with ThreadPool() as pool:
            pool.map(_check, [path for path, _ in found])

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

    def image(self, index: int) -> Image.Image:
        """The decoded image at ``index``, in RGB."""
        return opened(self.paths[index]).convert("RGB")


def class_folders(data_root: str, split: str | None = None) -> list[str]:
    """Names of the classes, sorted: the sub-folders of ``data_root[/split]``, if it is a folder."""
    root = _root(data_root, split)
    return find_classes(str(root))[0] if root.is_dir() else []


def opened(path: str) -> Image.Image:
    """The image of a file, with pixels of 8 bits: those of 16 are divided by 257.

    Raises:
        ValueError: it cannot be read, or its mode is one of `UNSCALED`.
    """
    with header(path) as file:
        file.load()
        if not file.mode.startswith("I;16"):
            return file
        wide = np.asarray(file).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))


@contextmanager
def header(path: str) -> Iterator[Image.Image]:
    """The image of a file, not decoded; errors in the body name the file.

    Raises:
        ValueError: see `opened`.
    """
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait for ever
            raise ValueError("it is no regular file")
        with Image.open(path) as file:
            if file.mode in UNSCALED:
                raise ValueError(
                    f"its mode {file.mode!r} has 32 bits and no scale; save it with 8 or 16 bits"
                )
            yield file
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"image {path!r} cannot be read: {error}.") from error


def _check(path: str) -> None:
    with header(path):
        pass


def _listed(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The classes, and of each image the path and the number of its class, sorted."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"no image folder at {str(root)!r} (data_root and split): expected <class>/<image> in "
            "it. Your own images: sort them into data_root/train/<class>/ and "
            "data_root/val/<class>/. ImageNet: get ILSVRC2012 from "
            "https://image-net.org/download.php, sorted the same way."
        )
    try:
        classes, numbers = find_classes(str(root))
        return classes, make_dataset(str(root), numbers, EXTENSIONS)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{root}: {error}") from error


def _root(data_root: str, split: str | None) -> Path:
    return Path(data_root).expanduser() / (split or "")
