"""Samplers: the epoch and the seed travel with every index; images repeated within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.registry import DATA_SAMPLERS
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import Sampler

from fst.basics.values import check_integer
from fst.engine.random_state import mixed_seed

REPETITION = 1 << 40  # an index plus r times this is the image's repetition r, drawn anew


class Sample(NamedTuple):
    """What a dataset is asked for. With it, augmentation depends on (seed, epoch, index) alone."""

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


@DATA_SAMPLERS.register_module()
class RepeatedAugmentationSampler(Sampler):
    """Each image in several augmentations at a time (Hoffer et al. 2020), by timm's sampler.

    An epoch has as many images as without: of DeiT's three repetitions, a third of the data set.
    The order depends on (seed, epoch), and each repetition has a key of its own.

    Args:
        dataset: What is sampled.
        repeats: How often an image follows itself; over all ranks.
        shuffle: Whether the images are shuffled.
        seed: It fixes the order; None: drawn once for all ranks.
    """

    def __init__(
        self, dataset: Sized, repeats: int = 3, shuffle: bool = True, seed: int | None = None
    ) -> None:
        check_integer("sampler repeats", repeats, 1)
        self.rank, self.world_size = get_dist_info()
        self.repeats = repeats
        self.seed = sync_random_seed() if seed is None else seed
        self.order = RepeatAugSampler(dataset, self.world_size, self.rank, shuffle, repeats)
        self.num_samples = len(self.order)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epoch = epoch
        self.order.set_epoch(mixed_seed(self.seed, epoch))

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(self.order):
            place = self.rank + number * self.world_size
            yield index + place % self.repeats * REPETITION
