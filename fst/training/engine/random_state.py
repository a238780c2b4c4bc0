"""Randomness that does not depend on the number of workers, on restarts, or on validation.

Augmentation of a sample is a pure function of (seed, epoch, index): `sample_keys` mixes the three
into 64-bit keys, from which come the batched draws of the preprocessor (`uniform`) and the state
under which a worker runs an image's transforms (`isolated`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(
    seed: int, epoch: int | Sequence[int], indices: Sequence[int] | np.ndarray
) -> np.ndarray:
    """One well-mixed 64-bit key per sample; ``epoch`` of all of them, or of each."""
    keys = _splitmix64(np.array([seed % 2**64], dtype=np.uint64))
    keys = _splitmix64(keys ^ np.asarray(epoch, dtype=np.uint64))
    return _splitmix64(keys ^ np.asarray(indices, dtype=np.uint64))


def mixed_seed(*values: int) -> int:
    """One 63-bit seed from several integers."""
    key = np.zeros(1, dtype=np.uint64)
    for value in values:
        key = _splitmix64(key ^ np.uint64(value % 2**64))
    return int(key[0] >> np.uint64(1))


def uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """``count`` independent uniform numbers in [0, 1) for each key: shape (count, len(keys))."""
    streams = np.arange(1, count + 1, dtype=np.uint64)[:, None] * _GOLDEN
    bits = _splitmix64(keys[None, :] ^ _splitmix64(streams))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Run the body under seeded global CPU generators and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def get_random_state() -> dict[str, Any]:
    """The state of every global generator of this process, as tensors and plain data."""
    name, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), *map(float, rest)),
        "torch": torch.default_generator.get_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `get_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    words = words.cpu().numpy().astype(np.uint32)
    np.random.set_state((name, words, int(position), int(has_gauss), cached))
    torch.default_generator.set_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def seed_worker(worker_id: int) -> None:
    """Seed a worker's Python and NumPy generators from torch's, which differs in every epoch."""
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed % 2**32)
