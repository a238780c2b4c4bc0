"""The examples run as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("strategy", ["fst", "dense"])
def test_own_loop_learns_and_folds(strategy: str) -> None:
    command = [sys.executable, "examples/own_loop.py", "--strategy", strategy, "--epochs", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    trained = float(re.findall(r"test accuracy ([\d.]+)", done.stdout)[-1])
    folded = float(re.search(r"folded: ([\d.]+)", done.stdout).group(1))
    assert trained > 90
    assert folded == pytest.approx(trained, abs=0.5)
