"""Kernels run on a GPU if there is one, else on the CPU through Triton's interpreter.

The interpreter is chosen by an environment variable before the kernels are imported, and would
disturb other tests of the same process: `test_interpreter.py` runs these files in processes of
their own.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def triton_compiler() -> None:
    """Triton is installed and compiles for GPUs in this process."""
    _need_triton()
    if INTERPRETED:
        pytest.skip("this process interprets the kernels")


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels run in this process."""
    _need_triton()
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU; test_interpreter.py runs this on the CPU")
    return torch.device(request.param)


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
