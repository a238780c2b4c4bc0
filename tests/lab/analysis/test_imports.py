"""The analyses' numbers need torch alone; matplotlib and mmengine serve the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_style import BEYOND_TORCH


@pytest.mark.system
def test_numeric_modules_import_torch_alone():
    code = f"import sys\nsys.modules.update(dict.fromkeys({BEYOND_TORCH!r}))\n"
    code += "from fst.lab.analysis import macs\nfrom fst.lab.reporting import document\n"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
