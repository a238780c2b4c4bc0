"""scikit-learn's digits: 1,797 real 8x8 images that need no download."""

from __future__ import annotations

import numpy as np
import torch
from mmengine.registry import DATASETS
from torch.nn import functional as F

from fst.engine.data.base import InMemoryDataset, check_split


@DATASETS.register_module()
class Digits(InMemoryDataset):
    """Handwritten digits (UCI), as bundled with scikit-learn; every fifth image is for testing.

    Args:
        split: "train" (1,438 images) or "test" (359).
        size: Height and width to scale the images to; None keeps 8.
        channels: 1, or 3 to repeat the grey channel for models of colour images.
        device: See `InMemoryDataset`.
        subset: See `InMemoryDataset`.
    """

    def __init__(
        self,
        split: str = "train",
        size: int | None = None,
        channels: int = 1,
        device: str = "cpu",
        subset: int | None = None,
    ) -> None:
        from sklearn.datasets import load_digits

        check_split(split, ("train", "test"))
        if channels not in (1, 3):
            raise ValueError(f"channels={channels!r} must be 1 or 3.")
        data = load_digits()
        images = torch.from_numpy(np.rint(data.images * (255 / 16)).astype(np.float32))[:, None]
        if size is not None:
            images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
        images = images.round().to(torch.uint8).expand(-1, channels, -1, -1).contiguous()
        test = torch.arange(len(images)) % 5 == 4
        rows = test if split == "test" else ~test
        labels = torch.from_numpy(data.target.astype(np.int64))
        super().__init__(images[rows], labels[rows], map(str, range(10)), subset, device)
