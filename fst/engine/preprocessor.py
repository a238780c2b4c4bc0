"""Batched augmentation and normalisation on the model's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS
from torch.nn import functional as F

from fst.basics.text import suggest
from fst.engine.random_state import uniform


@MODELS.register_module()
class ImagePreprocessor(BaseDataPreprocessor):
    """A batch moved to the device, augmented (in training only) and normalised.

    The random numbers come from the batch's ``keys``, that is from (seed, epoch, index).

    Args:
        mean: Per channel, in 0..255.
        std: Per channel, in 0..255.
        flip: Probability of a horizontal flip.
        translate: Largest shift in pixels, in both directions of both axes.
        padding_mode: What a shift brings in: "zero" (black), "mean" (the mean, cut to integers) or
            "reflect".
        cutout: Side of a square set to the mean; 0: none.
        cutout_mode: Where the square is: "centre", with its centre anywhere, so that borders cut it
            (DeVries & Taylor 2017), or "inside", wholly in the image (ffcv).
        non_blocking: Copy to the device asynchronously (of use with pin_memory=True).
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        flip: float = 0.0,
        translate: int = 0,
        padding_mode: str = "zero",
        cutout: int = 0,
        cutout_mode: str = "centre",
        non_blocking: bool = True,
    ) -> None:
        super().__init__(non_blocking=non_blocking)
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(
                f"mean={mean} and std={std} must have equal lengths, and std be positive."
            )
        if not 0 <= flip <= 1:
            raise ValueError(f"flip={flip!r} must be a probability.")
        for name, value in (("translate", translate), ("cutout", cutout)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be a non-negative number of pixels.")
        modes = (
            ("padding_mode", padding_mode, ("zero", "mean", "reflect")),
            ("cutout_mode", cutout_mode, ("centre", "inside")),
        )
        for name, mode, known in modes:
            if mode not in known:
                raise ValueError(f"{name}={mode!r} is unknown.{suggest(mode, known)}")
        self.flip, self.translate, self.cutout = flip, translate, cutout
        self.padding_mode, self.cutout_mode = padding_mode, cutout_mode
        self.register_buffer(
            "mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1), persistent=False
        )

    def forward(self, data: Mapping[str, Any], training: bool = False) -> dict[str, Any]:
        """``inputs`` (float, normalised) and, where given, ``labels``."""
        keys = data.get("keys")
        batch = {name: _stacked(data[name]) for name in ("inputs", "labels") if name in data}
        batch = self.cast_data(batch)
        inputs = batch["inputs"]
        if inputs.shape[1] != self.mean.shape[1]:
            raise ValueError(
                f"images have {inputs.shape[1]} channels, but mean and std {self.mean.shape[1]}."
            )
        augmented = training and (self.flip or self.translate or self.cutout)
        draws = self._draws(keys, inputs) if augmented else None
        if augmented:
            inputs = self._move(inputs, draws)
        inputs = (inputs.to(self.mean.dtype) - self.mean).div_(self.std)
        if augmented and self.cutout:
            inputs.masked_fill_(self._hole(inputs, draws), 0.0)
        return {**batch, "inputs": inputs}

    def _draws(self, keys: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Five uniform numbers per image: flip, shift down and right, place of the hole."""
        if keys is None:
            draws = torch.rand(5, len(inputs))
        else:
            keys = _stacked(keys).cpu().numpy().astype(np.int64).view(np.uint64)
            draws = torch.from_numpy(uniform(keys, 5))
        return draws.to(inputs.device, non_blocking=True)

    def _move(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Flip and shift every image by its own amounts, with one gather."""
        height, width = images.shape[-2:]
        pad = self.translate
        rows = torch.arange(height, device=images.device).expand(len(images), -1)
        columns = torch.arange(width, device=images.device).expand(len(images), -1)
        if self.flip:
            columns = torch.where(draws[0, :, None] < self.flip, width - 1 - columns, columns)
        if pad:
            shift = (draws[1:3, :, None] * (2 * pad + 1)).long()
            rows, columns = rows + shift[0], columns + shift[1]
            fill = self.mean.long() if self.padding_mode == "mean" else None
            images = _padded(images, pad, self.padding_mode, fill)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        return images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(
            0, 3, 1, 2
        )

    def _hole(self, inputs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        if self.cutout_mode == "inside" and self.cutout > min(inputs.shape[-2:]):
            raise ValueError(
                f"cutout={self.cutout} with cutout_mode='inside' does not fit into images of "
                f"{tuple(inputs.shape[-2:])} pixels."
            )

        def inside(length: int, place: torch.Tensor) -> torch.Tensor:
            if self.cutout_mode == "inside":
                first = (place * (length - self.cutout + 1)).long()[:, None]
            else:
                first = (place * length).long()[:, None] - self.cutout // 2
            position = torch.arange(length, device=inputs.device)
            return (position >= first) & (position < first + self.cutout)

        height, width = inputs.shape[-2:]
        return (inside(height, draws[3])[:, :, None] & inside(width, draws[4])[:, None, :])[:, None]


def _stacked(value: Any) -> torch.Tensor:
    return value if torch.is_tensor(value) else torch.stack([torch.as_tensor(v) for v in value])


def _padded(
    images: torch.Tensor, pad: int, mode: str, fill: torch.Tensor | None = None
) -> torch.Tensor:
    """``fill``: what "mean" brings in, (1, C, 1, 1)."""
    if mode != "reflect":
        padded = F.pad(images, [pad] * 4)
        if fill is not None:
            inner = F.pad(torch.ones_like(images[:1, :1], dtype=torch.bool), [pad] * 4)
            padded = torch.where(inner, padded, fill.to(padded.dtype))
        return padded
    rows, columns = (
        torch.arange(-pad, length + pad, device=images.device).abs() for length in images.shape[-2:]
    )
    rows, columns = (
        torch.where(i >= length, 2 * (length - 1) - i, i)
        for i, length in zip((rows, columns), images.shape[-2:], strict=True)
    )
    return images[:, :, rows][:, :, :, columns]
