"""Samplers whose indices carry the epoch and the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import Sampler


class Sample(NamedTuple):
    """The key of a sample. With it, augmentation depends on (seed, epoch, index) alone."""

    index: int
    epoch: int
    seed: int


class EpochSampler(Sampler):
    """One of mmengine's samplers, whose indices become `Sample`s.

    The epoch travels with the index because nothing else reaches a worker that lives across epochs.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.infinite = not hasattr(sampler, "num_samples")
        self._position = 0

    def __iter__(self) -> Iterator[Sample]:
        seed = self.sampler.seed
        if not self.infinite:
            epoch = self.sampler.epoch
            return (Sample(index, epoch, seed) for index in self.sampler)
        return self._endless(seed)

    def _endless(self, seed: int) -> Iterator[Sample]:
        length, world_size, rank = self.sampler.size, self.sampler.world_size, self.sampler.rank
        for position, index in enumerate(self.sampler, start=self._position):
            yield Sample(index, (position * world_size + rank) // length, seed)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Called by mmengine before each epoch."""
        self.sampler.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        # `skip` exists exactly where the wrapped sampler has it: mmengine asks with hasattr
        if name == "skip" and hasattr(self.__dict__.get("sampler"), "skip"):
            return self._skip
        raise AttributeError(name)

    def _skip(self, num_samples: int) -> None:
        self.sampler.skip(num_samples)
        self._position = num_samples
