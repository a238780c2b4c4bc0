"""SDGP's published kernel design, built on first use: the baseline that benchmarks compare with."""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from .extension import build

FILES = ("prune_baseline.cpp", "prune_baseline_sm80.cu")


@functools.cache
def extension() -> ModuleType:
    """The compiled kernel, built on first use.

    Raises:
        RuntimeError: see `fst.kernels.extension.build`.
    """
    return build("fst_prune_baseline", FILES)


def prune(grad_output: Tensor, n: int, m: int) -> Tensor:
    """grad_output (N, C, P, Q), contiguous or channels_last on a GPU, pruned by magnitude along C.

    m is 2, 4, 8, 16 or 32; one convolution group.
    """
    return extension().prune(grad_output, n, m)
