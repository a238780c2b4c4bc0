"""CIFAR-10, held in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import barrier, is_main_process
from mmengine.registry import DATASETS

from fst.basics.values import one_of
from fst.training.engine.data.base import InMemoryDataset

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
SHARDS = {"train": 10, "test": 2}
ORIGINAL = ("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


@DATASETS.register_module()
class CIFAR10(InMemoryDataset):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32.

    Args:
        data_root: Folder with torchvision's ``cifar-10-batches-py``, or with the packed form
            (``train_00.webp`` ... and ``train_labels.npy``: 5,000 images per lossless WebP, 50 in a
            row).
        split: "train" or "test".
        download: Let torchvision download the original files (170 MB) if they are missing.
        device: See `InMemoryDataset`.
        subset, skip: See `InMemoryDataset`.
    """

    def __init__(
        self,
        data_root: str,
        split: str = "train",
        download: bool = False,
        device: str = "cpu",
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.check(data_root=data_root, split=split, download=download)
        root = Path(data_root)
        if _shard(root, split, 0).is_file():
            images, labels = _load_packed(root, split)
        else:
            images, labels = _load_torchvision(root, split, download)
        super().__init__(images, labels, CLASSES, subset, device, skip)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Raise FileNotFoundError unless one of the two forms is whole or may be downloaded."""
        root, split = Path(config.get("data_root", "")), config.get("split", "train")
        one_of("split", split, tuple(SHARDS))
        original = root / "cifar-10-batches-py"
        if _shard(root, split, 0).is_file():
            files = [_shard(root, split, number) for number in range(SHARDS[split])]
            files.append(root / f"{split}_labels.npy")
        elif config.get("download"):
            return
        elif original.is_dir():
            files = [original / name for name in ORIGINAL]
        else:
            raise FileNotFoundError(
                f"no CIFAR-10 in data_root={str(root)!r}: it should hold cifar-10-batches-py/ (set "
                "download=True to fetch it, or unpack cifar-10-python.tar.gz of "
                "https://www.cs.toronto.edu/~kriz/cifar.html there) or the packed form "
                f"({_shard(root, split, 0).name}, ...)."
            )
        absent = [str(file) for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(
                f"CIFAR-10's split={split!r} is not whole: {', '.join(absent)} does not exist."
            )


def _shard(root: Path, split: str, number: int) -> Path:
    return root / f"{split}_{number:02d}.webp"


def _load_packed(root: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    images = []
    for number in range(SHARDS[split]):
        with Image.open(_shard(root, split, number)) as shard:
            tiles = np.asarray(shard.convert("RGB")).reshape(-1, 32, 50, 32, 3)
        images.append(tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
    labels = np.load(root / f"{split}_labels.npy").astype(np.int64)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(labels)


def _load_torchvision(root: Path, split: str, download: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from torchvision.datasets import CIFAR10 as Original

    if is_main_process():
        Original(root, train=split == "train", download=download)
    barrier()
    data = Original(root, train=split == "train")
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(data.targets)
