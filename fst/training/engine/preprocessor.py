"""Batches on the model's device: normalised, and erased and mixed by timm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing

from fst.training.engine.random_state import isolated, mixed_seed, seed_all
from fst.training.engine.recipe import built


@MODELS.register_module()
class ImagePreprocessor(BaseDataPreprocessor):
    """A batch moved to the device, normalised and, in training only, erased and mixed.

    Random numbers come from the batch's ``keys``, which come from (seed, epoch, index).

    Args:
        mean: Per channel, in 0..255.
        std: Per channel, in 0..255.
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
        mixup: Mapping[str, Any] | None = None,
        random_erasing: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(non_blocking=True)  # of use with pin_memory=True
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(
                f"mean={mean} and std={std} must have equal lengths, and std be positive."
            )
        self.mixup = built("mixup", Mixup, mixup) if mixup else None
        self.random_erasing = None
        if random_erasing:  # drawn on the CPU, whose generators are seeded for each batch
            self.random_erasing = built(
                "random_erasing", RandomErasing, random_erasing, device="cpu"
            )
        for name, values in (("mean", mean), ("std", std)):
            values = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, data: Mapping[str, Any], training: bool = False) -> dict[str, Any]:
        """``inputs`` (float, normalised) and, where given, ``labels``."""
        batch = {name: _stacked(data[name]) for name in ("inputs", "labels") if name in data}
        batch = self.cast_data(batch)
        inputs = batch["inputs"]
        if inputs.shape[1] != self.mean.shape[1]:
            raise ValueError(
                f"images have {inputs.shape[1]} channels, but mean and std {self.mean.shape[1]}."
            )
        inputs = (inputs.to(self.mean.dtype) - self.mean).div_(self.std)
        if training and (self.random_erasing or self.mixup):
            with isolated():
                seed_all(_seed(data.get("keys")))
                if self.random_erasing:
                    inputs = self.random_erasing(inputs)
                if self.mixup:
                    inputs, batch["labels"] = self.mixup(inputs, batch["labels"])
        return {**batch, "inputs": inputs}


def _stacked(value: Any) -> torch.Tensor:
    return value if torch.is_tensor(value) else torch.stack([torch.as_tensor(v) for v in value])


def _seed(keys: Any) -> int:
    """The seed of what is drawn for a batch; without keys, from the global generator."""
    return int(torch.randint(2**62, ())) if keys is None else mixed_seed(*map(int, keys))
