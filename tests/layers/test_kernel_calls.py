"""What a step costs the host where Triton's kernels prune: their launches, and Python calls."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {  # strategy -> Python calls of a layer beyond those of torch.nn.Conv2d, launches
    "srste": (42, 1),
    "fst_w": (64, 1),
    "sdgp": (57, 3),
    "sdgp,rule=magnitude": (52, 1),
    "fst": (92, 1),
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def counted() -> dict[str, list[float]]:
    """In a process without other layers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.kernel_calls"],
        cwd=ROOT,
        env={**os.environ, "FST_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("strategy", LIMITS)
def test_a_layers_step_takes_few_launches_and_calls(strategy, counted):
    calls, launches = counted[strategy]
    most_calls, most_launches = LIMITS[strategy]
    assert calls <= most_calls
    assert most_launches - 1 < launches <= most_launches  # the first layer has no dX
