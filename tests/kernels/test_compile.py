"""Every kernel compiles for sm_80 and sm_90a without a GPU, without spills and with wide loads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fst.backends import sources

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TARGETS = ("80", "90a")


NAMES = (
    "S(W), S(Wt) 2:4",
    "grad_output 2:4",
    "grad_output 2:4 random",
    "grad_output 4:8",
    "sums for rescaling 2:4",
)


@pytest.mark.parametrize("name", NAMES)
def test_triton(name, triton_compiler):
    launch = sources.load("samples").SAMPLES[name](True)
    for capability in (80, 90):
        made = sources.load("inspect_triton").compile_for(launch, capability)
        assert made.stack == 0
        assert made.registers <= 128
        assert any(kind.startswith("ld.global.v4") for kind in made.memory)


@pytest.mark.parametrize("target", TARGETS)
def test_the_baseline_of_benchmarks(target, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    source = ROOT / "benchmarks/gpu/prune_baseline_sm80.cu"
    made = subprocess.run(
        [
            *("nvcc", "-O3", "-std=c++17", "-Xptxas", "-v", "-c", str(source)),
            f"-gencode=arch=compute_{target},code=sm_{target}",
            *("-o", str(tmp_path / "object.o")),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    spills = re.findall(r"(\d+) bytes spill", made.stderr)
    assert spills
    assert not any(int(count) for count in spills)
