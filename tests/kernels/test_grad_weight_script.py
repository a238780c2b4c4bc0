"""benchmarks/gpu/grad_weight.py on tiny layers, through Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def test_the_measuring_script_runs(tmp_path):
    pytest.importorskip("triton")
    script, out = ROOT / "benchmarks/gpu/grad_weight.py", tmp_path / "out.json"
    command = [sys.executable, str(script), "--smoke", "--tiles", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = {(row["kernel"], row["contestant"]): row for row in found["rows"]}
    assert {kernel for kernel, _ in rows} == {1, 3}
    assert all(row["difference"] < 0.02 for row in found["rows"])
    for kernel in (1, 3):
        dense, fused = rows[kernel, "cuDNN dense"], rows[kernel, "triton, fused"]
        assert dense["flops"] == 2 * fused["flops"]
        assert dense["speed"] == 1
    # grad_output 2 x 16 x 6 x 6, the whole input 2 x 8 x 6 x 6, the weight: two bytes each
    assert rows[3, "triton, fused"]["bytes"] == 2 * (1152 + 576 + 1152)
    assert rows[3, "cuDNN strided, torch pair sum"]["bytes"] == 2 * (2 * 1152 + 576 + 1152)
    # grad_output 2 x 8 x 6 x 6, half of the input 2 x 16 x 6 x 6, the weight
    assert rows[1, "triton, fused"]["bytes"] == 2 * (576 + 576 + 128)
