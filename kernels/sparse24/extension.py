"""The compiled 2:4 kernels."""

from __future__ import annotations

import functools
from types import ModuleType

from ..extension import build

FILES = ("sparse24/binding.cpp", "sparse24/sparse24_sm80.cu")


@functools.cache
def extension() -> ModuleType:
    """Functions ``convolve`` and ``pack`` of `binding.cpp`, built on first use.

    Raises:
        RuntimeError: see `fst.kernels.extension.build`.
    """
    return build("fst_sparse24", FILES)
