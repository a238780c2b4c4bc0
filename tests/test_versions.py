"""PyTorch's versions: what works here, and in environments with the least and the newest one."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("versions")]
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "safetensors", "numpy")
LACKS = {
    "least": {".pt2", "torch.compile"},
    "newest": set(),
}  # see the table in docs/limits.md


def errors_in(python: str | Path) -> dict[str, str]:
    """The errors of versions_check.py by an interpreter, and the version of torch."""
    done = subprocess.run(
        [python, "tests/versions_check.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FST_AUTOTUNE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_works_with_this_torch():
    for library in PACKAGES:
        pytest.importorskip(library)
    found = errors_in(sys.executable)
    found.pop("torch")
    assert not any(found.values()), found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", LACKS)
def test_the_least_and_the_newest_torch_lack_what_is_said(which, tmp_path, request):
    """Each environment takes 6 GB of disk, and is deleted; `.ci/run` leaves this out."""
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    least = re.search(r"torch>=([\d.]+)", setup["options"]["install_requires"])[1]
    torch = f"torch=={least}.*" if which == "least" else "torch"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    options = "-q", "--no-cache-dir", "--no-compile"
    command = [python, "-m", "pip", "install", *options, torch, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{torch} cannot be installed here: {done.stderr.splitlines()[-1]}")
    found = errors_in(python)
    version = found.pop("torch")
    assert {name for name, error in found.items() if error} == LACKS[which], (version, found)
