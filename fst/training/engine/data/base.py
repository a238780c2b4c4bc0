"""Base of the image datasets: items, keys for augmentation and their sampler, balanced subsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Dataset, Sampler

from fst.basics.values import is_integer
from fst.training.engine.data.transforms import as_bytes, build_transforms
from fst.training.engine.random_state import isolated, mixed_seed, seed_all


class Sample(NamedTuple):
    """The key of a sample: augmentation depends on (seed, epoch, index) alone."""

    index: int
    epoch: int = 0
    seed: int = 0


class EpochSampler(Sampler):
    """One of mmengine's samplers, whose indices become `Sample`s.

    The epoch travels with the index because nothing else reaches a worker that lives across epochs.

    Args:
        dataset, seed: As mmengine gives them to a sampler.
        sampler: The config of mmengine's.
    """

    def __init__(self, dataset: Dataset, seed: int | None, sampler: dict[str, Any]) -> None:
        given = {"dataset": dataset, "seed": seed}
        self.sampler = DATA_SAMPLERS.build(sampler, default_args=given)
        self._start = 0
        if hasattr(self.sampler, "skip"):  # mmengine looks for the name
            self.skip = self._skip

    def __iter__(self) -> Iterator[Sample]:
        given = self.sampler
        for position, index in enumerate(given, self._start):
            if hasattr(given, "epoch"):
                epoch = given.epoch
            else:  # endless: each epoch has every image once on one of the ranks
                epoch = (position * given.world_size + given.rank) // given.size
            yield Sample(index, epoch, given.seed)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Called by mmengine before each epoch."""
        self.sampler.set_epoch(epoch)

    def _skip(self, num_samples: int) -> None:
        self.sampler.skip(num_samples)
        self._start = num_samples


class ImageDataset(Dataset):
    """Items: ``inputs`` uint8 (C, H, W), ``labels`` and ``keys``.

    A subclass has `image`.

    Args:
        labels: int64 (N).
        classes: Class names.
        transforms: See `fst.training.engine.data.transforms`; they draw from the item's key.
    """

    def __init__(
        self, labels: torch.Tensor, classes: Sequence[str], transforms: Sequence[dict[str, Any]]
    ) -> None:
        self.labels, self.classes = labels, classes
        self.transforms = build_transforms(transforms)

    @property
    def metainfo(self) -> dict[str, Any]:
        """Class names, under mmengine's name for them."""
        return {"classes": tuple(self.classes)}

    @classmethod
    def check(cls, **config: Any) -> None:
        """Refuse, before any work, data that is not there and arguments that make none."""

    def image(self, index: int) -> Any:
        """A PIL image, or a tensor uint8 (C, H, W)."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, sample: Sample | int) -> dict[str, Any]:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[Sample | int]) -> list[dict[str, Any]]:
        with isolated():
            return [self._item(*(s if isinstance(s, Sample) else Sample(int(s)))) for s in samples]

    def _item(self, index: int, epoch: int, seed: int) -> dict[str, Any]:
        image, key = self.image(index), mixed_seed(seed, epoch, index)
        seed_all(key)
        for step in self.transforms:
            if hasattr(step, "set_epoch"):
                step.set_epoch(epoch)
            image = step(image)
        return {"inputs": as_bytes(image), "labels": int(self.labels[index]), "keys": key}


class InMemoryDataset(ImageDataset):
    """Images held as one uint8 tensor.

    Args:
        images: uint8 (N, C, H, W).
        labels, classes, transforms: See `ImageDataset`.
        subset: Keep only this many images, the first ones of each class.
        skip: Leave out the images that ``subset=skip`` keeps: a validation split for choices is
            taken from the training data behind the images that are trained on.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        classes: Sequence[str],
        transforms: Sequence[dict[str, Any]] = (),
        subset: int | None = None,
        skip: int = 0,
    ) -> None:
        rows = balanced_subset(labels, subset, skip)
        super().__init__(labels[rows], classes, transforms)
        self.images = images[rows]

    def image(self, index: int) -> torch.Tensor:
        """The image at ``index``."""
        return self.images[index]


def balanced_subset(labels: torch.Tensor, size: int | None, skip: int = 0) -> torch.Tensor:
    """Rows of ``size`` samples, as equally many of each class as there are, first ones first.

    The rows of ``size=skip`` are skipped; without ``size`` all others are taken.
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
