"""Base of the image datasets: batched access, keys for augmentation, class-balanced subsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fst.basics.values import is_integer, one_of
from fst.training.engine.data.sampler import Sample
from fst.training.engine.random_state import sample_keys


class ImageDataset(Dataset):
    """Whole batches: ``inputs`` uint8 (N, C, H, W), ``labels`` int64 (N), ``keys`` int64 (N).

    A subclass sets ``labels`` and ``classes`` and has `load_images`.
    """

    labels: torch.Tensor
    classes: Sequence[str]

    @property
    def metainfo(self) -> dict[str, Any]:
        """Class names, under mmengine's name for them."""
        return {"classes": tuple(self.classes)}

    @classmethod
    def check(cls, **config: Any) -> None:
        """Refuse, before any work, data that is not there and arguments that make none."""

    def load_images(self, indices: Sequence[int], epoch: int, keys: np.ndarray) -> torch.Tensor:
        """The images at ``indices``, augmented as ``keys`` say."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, samples: Sequence[Sample | int]) -> dict[str, torch.Tensor]:
        indices, epochs, seeds = zip(
            *(s if isinstance(s, Sample) else Sample(int(s)) for s in samples), strict=True
        )
        keys = sample_keys(seeds[0], epochs, indices)
        return {
            "inputs": self.load_images(indices, epochs[0], keys),
            "labels": self.labels[rows_on(indices, self.labels.device)],
            "keys": torch.from_numpy(keys.view(np.int64)),
        }

    def __getitem__(self, sample: Sample | int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self.__getitems__([sample]).items()}


class InMemoryDataset(ImageDataset):
    """Images held as one uint8 tensor, on the GPU if wanted.

    Args:
        images: uint8 (N, C, H, W).
        labels: int64 (N).
        classes: Class names.
        subset: Keep only this many images, the first ones of each class.
        skip: Leave out the images that ``subset=skip`` keeps: a validation split for choices is
            taken from the training data behind the images that are trained on.
        device: "cpu", "cuda", or "auto" (the GPU if there is one). Batches from the GPU never pass
            through workers, so the dataloader needs num_workers=0.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        classes: Sequence[str],
        subset: int | None = None,
        device: str = "cpu",
        skip: int = 0,
    ) -> None:
        one_of("device", device, ("cpu", "cuda", "auto"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda', but torch finds no GPU; use device='auto' or 'cpu'.")
        self.classes = classes
        rows = balanced_subset(labels, subset, skip)
        self.images, self.labels = images[rows].to(device), labels[rows].to(device)

    def load_images(self, indices: Sequence[int], epoch: int, keys: np.ndarray) -> torch.Tensor:
        """Gather the batch in one indexing operation; the preprocessor augments it."""
        return self.images[rows_on(indices, self.images.device)]


def rows_on(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices on a device, without waiting for the work queued there."""
    return torch.tensor(indices).to(device, non_blocking=True)


def balanced_subset(labels: torch.Tensor, size: int | None, skip: int = 0) -> torch.Tensor:
    """Rows of ``size`` samples, as equally many of each class as there are, first ones first.

    Those of the first ``skip`` are left out; without ``size`` all others are meant.
    """
    if not is_integer(skip) or not 0 <= skip < len(labels):
        raise ValueError(f"skip={skip!r} must be an integer from 0 to {len(labels) - 1}.")
    left = len(labels) - skip
    size = left if size is None else size
    if not is_integer(size) or not 1 <= size <= left:
        raise ValueError(f"subset={size!r} must be an integer from 1 to {left} with skip={skip}.")
    # rank of each sample within its class: taking the smallest ranks first balances the classes
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = torch.cumsum(counts, 0) - counts
    rank = torch.empty_like(labels)
    rank[order] = torch.arange(len(labels)) - starts[labels[order]]
    return torch.argsort(rank, stable=True)[skip : skip + size].sort().values
