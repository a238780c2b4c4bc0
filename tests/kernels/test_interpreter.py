"""The kernels' tests, run through Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("test_network.py", marks=pytest.mark.exhaustive),
        pytest.param("test_operators.py", marks=pytest.mark.exhaustive),
        pytest.param("test_prune_gradient.py", marks=pytest.mark.exhaustive),
        "test_prune_weight.py",
    ],
)
def test_through_the_interpreter(name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
