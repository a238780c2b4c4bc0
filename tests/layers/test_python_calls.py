"""What a layer's training step costs the host, counted in Python calls instead of in times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fst.ops import cpp

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {  # strategy -> calls of a layer in rows "small" and "wide" of python_calls.py
    "dense": {"small": 15, "wide": 16},
    "srste": {"small": 35, "wide": 63},
    "fst_w": {"small": 58, "wide": 63},
    "sdgp": {"small": 53, "wide": 51},
    "fst": {"small": 83, "wide": 86},
    "sampled": {"small": 83, "wide": 83},
    "fst_sampled": {"small": 98, "wide": 102},
}

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, float]]:
    """In a process without other layers; the backends are those expected by shapes and zeros."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.python_calls"],
        cwd=ROOT,
        env={**os.environ, "FST_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("strategy", LIMITS)
@pytest.mark.parametrize("row", ["small", "wide"])
def test_a_layers_step_takes_at_most_so_many_calls(row, strategy, counted):
    assert counted[row][strategy] <= LIMITS[strategy][row]
