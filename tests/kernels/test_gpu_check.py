"""benchmarks/gpu_check.sh as far as it goes without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"


def _run(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OUT_DIR": str(out)}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_help_lists_every_part(tmp_path):
    listed = re.findall(r"^  (\d+) +(\w+)", _run("--help", out=tmp_path).stdout, re.MULTILINE)
    text = SCRIPT.read_text()
    assert [number for number, _ in listed] == [str(i) for i in range(len(listed))]
    names = re.search(r"names=\((.*?)\)", text, re.DOTALL)[1].split()
    assert names == [name for _, name in listed]
    assert all(f"part_{name}()" in text for _, name in listed)


def test_wrong_use_and_no_gpu_are_errors(tmp_path):
    unknown = _run("10", out=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "usage:" in unknown.stderr
    without = _run("3", out=tmp_path)
    assert without.returncode == 1
    assert "finds no CUDA device" in without.stderr
    assert not list(tmp_path.iterdir())
