"""scikit-learn's digits, 1,797 real 8x8 images that need no download: plain, or among clutter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mmengine.registry import DATASETS
from torch.nn import functional as F

from fst.basics.values import check_integer, is_integer, one_of
from fst.training.engine.data.base import InMemoryDataset
from fst.training.engine.random_state import sample_keys, uniform

SPLITS = ("train", "test")
SIDE = 8  # of the bundled images
CLASSES = tuple(map(str, range(10)))
RANGES = {  # of cluttered ones
    "size": (SIDE + 1, 1024),
    "fragments": (0, 1024),
    "side": (1, SIDE),
    "noise": (0, 255),
    "scenes": (1, 1024),
}


@DATASETS.register_module()
class Digits(InMemoryDataset):
    """Handwritten digits (UCI), as bundled with scikit-learn; every fifth image is for testing.

    Args:
        split: "train" (1,438 images) or "test" (359).
        size: Height and width to scale the images to; None keeps 8.
        channels: 1, or 3 to repeat the grey channel for models of colour images.
        device: See `InMemoryDataset`.
        subset, skip: See `InMemoryDataset`.
    """

    def __init__(
        self,
        split: str = "train",
        size: int | None = None,
        channels: int = 1,
        device: str = "cpu",
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.check(split=split, size=size, channels=channels)
        grey, labels = _bundled(split)
        images = torch.from_numpy(grey)[:, None]
        if size is not None:
            images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
        images = images.round().to(torch.uint8).expand(-1, channels, -1, -1).contiguous()
        super().__init__(images, labels, CLASSES, subset, device, skip)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Refuse values that are out of range."""
        one_of("split", config.get("split", "train"), SPLITS)
        one_of("channels", config.get("channels", 1), (1, 3))
        if config.get("size") is not None:
            check_integer("size", config["size"], 1)


@DATASETS.register_module()
class ClutteredDigits(InMemoryDataset):
    """Each digit at a random place among fragments of other digits, and noise: a harder task.

    As in "Recurrent Models of Visual Attention" (Mnih et al., NeurIPS 2014) with MNIST. Places,
    fragments and noise are drawn once, from the image's index alone: every run sees the same
    images. Fragments come from digits of the same split.

    Args:
        split: "train" (1,438 digits) or "test" (359).
        size: Height and width of the images, 9 or more.
        fragments: Squares cut out of other digits, put at random places.
        side: Height and width of a fragment, 1 to 8.
        noise: Largest value added to a pixel, 0 to 255.
        scenes: Images of each digit, with other surroundings in each.
        device: See `InMemoryDataset`.
        subset, skip: See `InMemoryDataset`.
    """

    def __init__(
        self,
        split: str = "train",
        size: int = 24,
        fragments: int = 8,
        side: int = 5,
        noise: int = 64,
        scenes: int = 1,
        device: str = "cpu",
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.check(
            split=split, size=size, fragments=fragments, side=side, noise=noise, scenes=scenes
        )
        digits, labels = _bundled(split)
        count = len(digits) * scenes
        keys = sample_keys(0, SPLITS.index(split), range(count))
        draws = iter(uniform(keys, 2 + 5 * fragments + size * size))
        own = np.arange(count) % len(digits)
        images = np.zeros((count, size, size), dtype=np.float32)
        zero = np.zeros(count, dtype=np.int64)

        def draw(bound: int) -> np.ndarray:
            return (next(draws) * bound).astype(np.int64)

        for _ in range(fragments):
            other = (own + 1 + draw(len(digits) - 1)) % len(digits)
            corner = draw(SIDE + 1 - side), draw(SIDE + 1 - side)
            place = draw(size + 1 - side), draw(size + 1 - side)
            _paste(images, place, digits, other, corner, side)
        place = draw(size + 1 - SIDE), draw(size + 1 - SIDE)
        _paste(images, place, digits, own, (zero, zero), SIDE)
        images += noise * np.stack(list(draws), axis=1).reshape(images.shape)
        pixels = torch.from_numpy(images).clamp_(0, 255).round().to(torch.uint8)[:, None]
        super().__init__(pixels, labels.repeat(scenes), CLASSES, subset, device, skip)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Refuse values that are out of range."""
        one_of("split", config.get("split", "train"), SPLITS)
        for name in RANGES.keys() & config.keys():
            (least, most), value = RANGES[name], config[name]
            if not is_integer(value) or not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be an integer from {least} to {most}.")


def _bundled(split: str) -> tuple[np.ndarray, torch.Tensor]:
    """Images, float32 (N, 8, 8) in 0..255, and labels; every fifth image is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.float32)
    test = np.arange(len(images)) % 5 == 4
    rows = test if split == "test" else ~test
    return images[rows], torch.from_numpy(data.target.astype(np.int64))[rows]


def _paste(
    images: np.ndarray,
    place: tuple[np.ndarray, np.ndarray],
    source: np.ndarray,
    rows: np.ndarray,
    corner: tuple[np.ndarray, np.ndarray],
    side: int,
) -> None:
    """Lay a square of ``source[rows]``, from ``corner`` on, over each image; the brighter shows."""
    steps = np.arange(side)
    down, right = (start[:, None] + steps for start in place)
    target = np.arange(len(images))[:, None, None], down[:, :, None], right[:, None, :]
    down, right = (start[:, None] + steps for start in corner)
    square = source[rows[:, None, None], down[:, :, None], right[:, None, :]]
    images[target] = np.maximum(images[target], square)
