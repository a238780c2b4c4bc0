"""The whole tree passes ruff, and importing the core needs torch alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BEYOND_TORCH = ("mmengine", "timm", "torchvision", "torchmetrics", "matplotlib", "sklearn", "numpy")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]) -> None:
    arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_imports_torch_alone() -> None:
    """A meta path finder refuses every other package (torch itself runs without numpy)."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {BEYOND_TORCH!r}:\n"
        "            raise ImportError('not installed: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import fst, fst.models\n"
        "import torch\n"
        "layer = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))\n"
        "fst.convert(layer, 'fst')\n"
        "layer(torch.randn(1, 4, 6, 6)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
