"""The C++ kernels of the instruction sets below this processor's widest, which all else runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fst.ops import cpp

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"DEFAULT": "cpu_base.so", "AVX2": "cpu_avx2.so", "AVX512": "cpu_avx512.so"}
WIDEST = torch.backends.cpu.get_cpu_capability()
FOLDERS = ("tests/kernels", "tests/inference")
BELOW = list(itertools.takewhile(lambda name: name != WIDEST, LIBRARIES))

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


@pytest.mark.skipif(WIDEST not in LIBRARIES, reason=f"{WIDEST} has one library")
@pytest.mark.parametrize(
    "level", [pytest.param(n, marks=[pytest.mark.system] * (n == "DEFAULT")) for n in BELOW]
)
def test_each_kernel_computes_its_reference(level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "each_isa", *FOLDERS],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": level.lower(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"C++ kernels: {LIBRARIES[level]} (torch uses {level})" in done.stdout
