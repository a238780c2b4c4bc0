"""Randomness that does not depend on the number of workers, on restarts, or on validation.

What is drawn for a sample is a function of (seed, epoch, index): `mixed_seed` makes its key of the
three, which seeds the generators before its transforms run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_WORD = 2**64 - 1


def splitmix64(x: Any) -> Any:
    """A step of splitmix64 (Steele et al. 2014), of an integer or of an array of uint64."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def mixed_seed(*values: int) -> int:
    """One 63-bit seed from several integers."""
    key = 0
    for value in values:
        key = splitmix64(key ^ (value & _WORD))
    return key >> 1


def seed_all(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_worker(worker_id: int) -> None:
    """Seed a worker from torch's generator, which differs in every epoch."""
    seed_all(torch.initial_seed())


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the global CPU generators after the body."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
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
