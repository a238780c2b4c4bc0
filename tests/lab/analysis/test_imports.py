"""The analyses' numbers need torch alone; matplotlib and mmengine serve the command line."""

import subprocess
import sys
from pathlib import Path

from tests.test_style import BEYOND_TORCH

NUMERIC = ("macs", "result")


def test_numeric_modules_import_torch_alone():
    code = f"import sys\nsys.modules.update(dict.fromkeys({BEYOND_TORCH!r}))\n"
    code += f"from fst.lab.analysis import {', '.join(NUMERIC)}\n"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
