"""benchmarks/gpu_check.sh as far as it goes without a GPU."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"
STAND_IN = """#!/bin/sh
case "$*" in
*"import mmdet"*) exit 1 ;;
-c*) exit 0 ;;
esac
echo "ran $*"
case "$*" in *"-m pytest"*) exit 3 ;; esac
"""


def _run(*arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A Python that finds a GPU and whose tests fail."""
    file = tmp_path / "python"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    return file


def test_help_lists_every_call(tmp_path):
    listed = re.findall(r"^  (\d) +\w+", _run("--help", OUT=tmp_path).stdout, re.MULTILINE)
    written = re.findall(r"^call_(\d)\(\)", SCRIPT.read_text(), re.MULTILINE)
    assert listed == written == ["1", "2", "3"]


def test_wrong_use_and_no_gpu_are_errors(tmp_path):
    unknown = _run("4", OUT=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "usage:" in unknown.stderr
    without = _run("2", OUT=tmp_path)
    assert without.returncode == 1
    assert "finds no CUDA device" in without.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["1", "2", "3"])
def test_results_are_one_archive_in_the_given_folder(call, stand_in, tmp_path):
    """What fails is said, and does not keep the rest from running."""
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    (work / "results.md").write_text("90 %")
    (work / "epoch_1.pth").write_text("weights")
    done = _run(call, OUT=out, PYTHON=stand_in, WORK=work)
    assert [file.name for file in out.iterdir()] == [f"call{call}.tgz"]
    with tarfile.open(out / f"call{call}.tgz") as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    logs = {Path(n).stem: text.decode() for n, text in files.items() if n.endswith(".log")}
    assert all("ran " in log for log in logs.values())
    failed = {name for name, log in logs.items() if "ended with 3" in log}
    assert (done.returncode == 1) == bool(failed)
    assert re.search(r"failed: (.*)", done.stdout)[1].split() == (sorted(failed) or ["nothing"])
    if call == "2":
        assert failed == {"tests"} and "-n 14 " in logs["tests"]
        assert done.stdout.index("-m pytest") < done.stdout.index("benchmarks/trainings.py")
        assert 480 < int(re.search(r"--seconds (\d+)", logs["trainings"])[1]) <= 510
        with tarfile.open(fileobj=io.BytesIO(files["call2/trainings.tar"])) as archive:
            assert [m.name for m in archive if m.isfile()] == ["./results.md"]


@pytest.mark.parametrize(("call", "parts"), [("1", 5), ("2", 2), ("3", 3)])
def test_a_call_ends_in_time(call, parts, stand_in, tmp_path):
    folders = {"OUT": tmp_path / "out", "WORK": tmp_path / "work"}
    done = _run(call, PYTHON=stand_in, LIMIT=5, **folders)
    assert done.stdout.count("no time left") == parts and "ran" not in done.stdout
