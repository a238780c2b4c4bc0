"""scikit-learn's digits, 1,797 real 8x8 images that need no download: plain, or among clutter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.registry import DATASETS
from torch.nn import functional as F

from fst.basics.values import check_integer, is_integer, one_of
from fst.training.engine.data.base import InMemoryDataset
from fst.training.engine.random_state import splitmix64

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
        transforms, subset, skip: See `InMemoryDataset`.
    """

    def __init__(
        self,
        split: str = "train",
        size: int | None = None,
        transforms: Sequence[dict[str, Any]] = (),
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        self.check(split=split, size=size)
        grey, labels = _bundled(split)
        images = torch.from_numpy(grey)[:, None]
        if size is not None:
            images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
        images = images.round().to(torch.uint8)
        super().__init__(images, labels, CLASSES, transforms, subset, skip)

    @classmethod
    def check(cls, **config: Any) -> None:
        """Refuse values that are out of range."""
        one_of("split", config.get("split", "train"), SPLITS)
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
        **others: transforms, subset, skip, see `InMemoryDataset`.
    """

    def __init__(
        self,
        split: str = "train",
        size: int = 24,
        fragments: int = 8,
        side: int = 5,
        noise: int = 64,
        scenes: int = 1,
        **others: Any,
    ) -> None:
        self.check(
            split=split, size=size, fragments=fragments, side=side, noise=noise, scenes=scenes
        )
        digits, labels = _bundled(split)
        count = len(digits) * scenes
        draws = iter(_uniform(SPLITS.index(split), count, 2 + 5 * fragments + size * size))
        own = np.arange(count) % len(digits)
        images = np.zeros((count, size, size), dtype=np.float32)

        def draw(bound: int) -> np.ndarray:
            return (next(draws) * bound).astype(np.int64)

        for _ in range(fragments):
            other = (own + 1 + draw(len(digits) - 1)) % len(digits)
            corner = draw(SIDE + 1 - side), draw(SIDE + 1 - side)
            place = draw(size + 1 - side), draw(size + 1 - side)
            squares = zip(other, *corner, strict=True)
            _paste(images, place, [digits[n, y : y + side, x : x + side] for n, y, x in squares])
        place = draw(size + 1 - SIDE), draw(size + 1 - SIDE)
        _paste(images, place, digits[own])
        images += noise * np.stack(list(draws), axis=1).reshape(images.shape)
        pixels = torch.from_numpy(images).clamp_(0, 255).round().to(torch.uint8)[:, None]
        super().__init__(pixels, labels.repeat(scenes), CLASSES, **others)

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


def _uniform(split: int, images: int, count: int) -> np.ndarray:
    """``count`` independent numbers in [0, 1) for each image: float32 (count, images)."""
    keys = splitmix64(splitmix64(splitmix64(0) ^ split) ^ np.arange(images, dtype=np.uint64))
    streams = splitmix64(np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15)
    bits = splitmix64(keys ^ streams[:, None])
    return (bits >> 40).astype(np.float32) * np.float32(2**-24)


def _paste(
    images: np.ndarray, place: tuple[np.ndarray, np.ndarray], squares: Iterable[np.ndarray]
) -> None:
    """Draw a square over each image, rows and columns from ``place`` on; the brighter shows."""
    for image, y, x, square in zip(images, *place, squares, strict=True):
        part = image[y : y + len(square), x : x + len(square)]
        np.maximum(part, square, out=part)
