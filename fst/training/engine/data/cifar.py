"""CIFAR-10 and CIFAR-100 of torchvision, held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from mmengine.dist import barrier, is_main_process
from mmengine.registry import DATASETS
from PIL import Image

from fst.basics.values import one_of
from fst.training.engine.data.base import InMemoryDataset

SHARDS = {"train": 10, "test": 2}


@DATASETS.register_module()
class CIFAR10(InMemoryDataset):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32.

    Args:
        data_root: Folder with torchvision's ``cifar-10-batches-py``, or with the packed form
            (``train_00.webp`` ... and ``train_labels.npy``: 5,000 images per lossless WebP, 50 in a
            row).
        split: "train" or "test".
        download: Let torchvision download the original files (170 MB) if they are missing.
        transforms, subset, skip: See `InMemoryDataset`.
    """

    original = torchvision.datasets.CIFAR10
    names = "airplane automobile bird cat deer dog frog horse ship truck".split()

    def __init__(
        self,
        data_root: str,
        split: str = "train",
        download: bool = False,
        transforms: Sequence[dict[str, Any]] = (),
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.check(data_root=data_root, split=split, download=download)
        root = Path(data_root)
        if (root / f"{split}_labels.npy").is_file():
            images, labels, classes = *_packed(root, split), self.names
        else:
            images, labels, classes = self._downloaded(root, split, download)
        super().__init__(images, labels, classes, transforms, subset, skip)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Raise FileNotFoundError unless one of the two forms is there or may be downloaded."""
        root, split = Path(config.get("data_root", "")), config.get("split", "train")
        one_of("split", split, tuple(SHARDS))
        folder = root / cls.original.base_folder
        packed = root / f"{split}_labels.npy"
        if not (config.get("download") or folder.is_dir() or packed.is_file()):
            raise FileNotFoundError(
                f"no {cls.__name__} in data_root={str(root)!r}: it should hold {folder.name}/ (set "
                f"download=True to fetch it, or unpack {cls.original.filename} of "
                f"https://www.cs.toronto.edu/~kriz/cifar.html there) or {packed.name}."
            )

    def _downloaded(self, root: Path, split: str, download: bool) -> tuple[Any, ...]:
        is_train = split == "train"
        try:
            if is_main_process():
                self.original(root, is_train, download=download)
            barrier()
            data = self.original(root, is_train)
        except RuntimeError as error:
            raise FileNotFoundError(f"data_root={str(root)!r}: {error}") from error
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(data.targets), data.classes


@DATASETS.register_module()
class CIFAR100(CIFAR10):
    """CIFAR-100, of 100 classes; otherwise as `CIFAR10`, in torchvision's form."""

    original = torchvision.datasets.CIFAR100


def _packed(root: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = []
    for number in range(SHARDS[split]):
        with Image.open(root / f"{split}_{number:02d}.webp") as shard:
            tiles = np.asarray(shard.convert("RGB")).reshape(-1, 32, 50, 32, 3)
        images.append(tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
    labels = np.load(root / f"{split}_labels.npy").astype(np.int64)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(labels)
