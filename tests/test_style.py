"""The whole tree passes ruff, and importing the core needs torch alone."""

import pytest

from tests.programs import python

BEYOND_TORCH = ("mmengine", "timm", "torchvision", "torchmetrics", "matplotlib", "sklearn", "numpy")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]) -> None:
    python("-m", "ruff", *command, "--no-cache", ".")


def test_the_core_imports_torch_alone() -> None:
    """Even with every other package hidden (torch itself runs without numpy)."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({BEYOND_TORCH!r}))\n"
        "import torch, fst, fst.models\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))\n"
        "fst.convert(model, 'fst')\n"
        "model(torch.randn(1, 4, 6, 6)).sum().backward()\n"
        "assert fst.verify(fst.fold(model)).ok\n"
    )
    python("-c", code)
