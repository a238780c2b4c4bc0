"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fst.ops import cpp
from tests.campaign import sanitize
from tests.kernels.test_instruction_sets import FOLDERS

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}"),
    pytest.mark.skipif(bool(sanitize.missing()), reason=sanitize.missing()),
]
ROOT = Path(__file__).resolve().parents[2]


def test_each_kernel_stays_within_its_operands() -> None:
    """`make sanitize` runs more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign.sanitize", "-q", "-m", "each_isa", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
