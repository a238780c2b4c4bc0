"""Batched augmentation and normalisation on the model's device.

Own are the flip, the shift and the hole, which differ from image to image of a batch and are drawn
from the images' keys: torchvision's transforms treat a batch alike and draw from global generators.
Mixing and random erasing are timm's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS
from torch.nn import functional as F

from fst.basics.values import check_integer, check_number, one_of
from fst.training.engine.random_state import isolated, mixed_seed, uniform
from fst.training.engine.recipe import build_mixup, build_random_erasing


@MODELS.register_module()
class ImagePreprocessor(BaseDataPreprocessor):
    """A batch moved to the device, augmented (in training only) and normalised.

    The random numbers come from the batch's ``keys``, that is from (seed, epoch, index): those of
    an image's flip, shift and hole from its own key, those of mixing and random erasing from the
    keys of the whole batch.

    Args:
        mean: Per channel, in 0..255.
        std: Per channel, in 0..255.
        flip: Probability of a horizontal flip.
        translate: Largest shift in pixels, in both directions of both axes; it brings in black.
        cutout: Side of a square set to the mean; 0: none.
        cutout_mode: Where the square is: "centre", with its centre anywhere, so that borders cut it
            (DeVries & Taylor 2017), or "inside", wholly in the image (ffcv).
        mixup: Arguments of `timm.data.Mixup`, such as mixup_alpha, cutmix_alpha and
            label_smoothing: images and labels are mixed, and labels become probabilities (N, C).
            Within a Classifier, num_classes is the architecture's.
        random_erasing: Arguments of `timm.data.random_erasing.RandomErasing`, such as probability,
            mode ("const", "rand", "pixel") and max_count: rectangles of the normalised images are
            overwritten, before they are mixed, as in DeiT's and ConvNeXt's training.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        flip: float = 0.0,
        translate: int = 0,
        cutout: int = 0,
        cutout_mode: str = "centre",
        mixup: Mapping[str, Any] | None = None,
        random_erasing: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(non_blocking=True)  # of use with pin_memory=True
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(
                f"mean={mean} and std={std} must have equal lengths, and std be positive."
            )
        check_number("flip", flip, "[0, 1]")
        check_integer("translate", translate, 0)
        check_integer("cutout", cutout, 0)
        one_of("cutout_mode", cutout_mode, ("centre", "inside"))
        self.flip, self.translate, self.cutout = flip, translate, cutout
        self.cutout_mode = cutout_mode
        self.mixup = build_mixup(mixup)
        self.random_erasing = build_random_erasing(random_erasing)
        for name, values in (("mean", mean), ("std", std)):
            values = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
            self.register_buffer(name, values, persistent=False)

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
        if not training:
            return {**batch, "inputs": self._normalised(inputs)}
        draws = self._draws(keys, inputs)
        inputs = self._normalised(self._move(inputs, draws))
        if self.cutout:
            inputs.masked_fill_(self._hole(inputs, draws), 0.0)
        if self.random_erasing or self.mixup:
            with isolated(_seed(keys)):
                if self.random_erasing:
                    inputs = self.random_erasing(inputs)
                if self.mixup:
                    inputs, batch["labels"] = self.mixup(inputs, batch["labels"])
        return {**batch, "inputs": inputs}

    def _normalised(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(self.mean.dtype) - self.mean).div_(self.std)

    def _draws(self, keys: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Five uniform numbers per image: flip, shift down and right, place of the hole."""
        if keys is None:
            draws = torch.rand(5, len(inputs))
        else:
            draws = torch.from_numpy(uniform(_unsigned(keys), 5))
        return draws.to(inputs.device, non_blocking=True)

    def _move(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Flip and shift every image by its own amounts, with one gather."""
        if not self.flip and not self.translate:
            return images
        height, width = images.shape[-2:]
        pad = self.translate
        rows = torch.arange(height, device=images.device).expand(len(images), -1)
        columns = torch.arange(width, device=images.device).expand(len(images), -1)
        columns = torch.where(draws[0, :, None] < self.flip, width - 1 - columns, columns)
        if pad:
            shift = (draws[1:3, :, None] * (2 * pad + 1)).long()
            rows, columns = rows + shift[0], columns + shift[1]
            images = F.pad(images, [pad] * 4)
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


def _unsigned(keys: Any) -> np.ndarray:
    return _stacked(keys).cpu().numpy().astype(np.int64).view(np.uint64)


def _seed(keys: Any) -> int:
    """The seed of what is drawn for a batch as a whole; without keys, from the global generator."""
    if keys is None:
        return int(torch.randint(2**62, ()))
    return mixed_seed(int(np.bitwise_xor.reduce(_unsigned(keys))))
