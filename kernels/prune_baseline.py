"""SDGP's published kernel design, built on first use: the baseline that benchmarks compare with."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from torch import Tensor
from torch.utils import cpp_extension

FOLDER = Path(__file__).resolve().parent
SOURCES = ("prune_baseline.cpp", "prune_baseline_sm80.cu")


@functools.cache
def extension() -> ModuleType:
    """Compile (once; torch keeps the result in its extension cache) and load.

    Raises:
        RuntimeError: no compiler, or the compilation failed; the message says what to install.
    """
    try:
        return cpp_extension.load(
            name="fst_prune_baseline",
            sources=[str(FOLDER / name) for name in SOURCES],
            extra_cuda_cflags=["-O3"],
        )
    except (OSError, RuntimeError, ImportError) as error:
        raise RuntimeError(
            "the baseline kernel could not be built: it needs nvcc of the CUDA version torch was "
            f"built with, a C++ compiler and ninja ({error})."
        ) from error


def prune(grad_output: Tensor, n: int, m: int) -> Tensor:
    """grad_output (N, C, P, Q), contiguous or channels_last on a GPU, pruned by magnitude along C.

    m is 2, 4, 8, 16 or 32; one convolution group.
    """
    return extension().prune(grad_output, n, m)
