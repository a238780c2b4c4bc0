"""The compiled 2:4 kernels, and the tiles they can be run with."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

from ..extension import build

FILES = ("sparse24/binding.cpp", "sparse24/sparse24_sm80.cu")


class Tile(NamedTuple):
    """Rows of the weight and positions that a block of threads computes, and steps in flight."""

    rows: int
    positions: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.positions}x{self.stages}"


TILES = (Tile(128, 128, 3), Tile(128, 128, 4), Tile(64, 128, 4), Tile(64, 256, 3))


@functools.cache
def extension() -> ModuleType:
    """Functions ``convolve`` and ``pack`` of `binding.cpp`, built on first use.

    Raises:
        RuntimeError: see `fst.kernels.extension.build`.
    """
    return build("fst_sparse24", FILES)
