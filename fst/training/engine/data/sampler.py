"""Samplers whose indices carry the epoch and the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Dataset, Sampler


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
