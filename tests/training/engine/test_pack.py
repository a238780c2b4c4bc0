"""`fst pack` on the trained example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fst
from fst.cli import commands as cli
from fst.ops.cpp.library import missing
from fst.training.engine.config import load_config
from fst.training.engine.trained import trained_model

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "trained"
NETWORKS = ("resnet9_srste", "resnet9_srste_1of4")
LOAD = {
    ".pt": "model = torch.load(path, weights_only=False)",
    ".pt2": "import fst.ops.cpp.zeros_weight; model = torch.export.load(path).module()",
}


def files(network: str) -> list[str]:
    return [str(TRAINED / f"{network}{suffix}") for suffix in (".py", ".pth")]


@pytest.mark.system
@pytest.mark.parametrize(
    ("network", "suffix"),
    [(NETWORKS[0], ".pt"), pytest.param(NETWORKS[1], ".pt2", marks=pytest.mark.system)],
)
def test_another_process_runs_the_file(
    network: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given, path = files(network), tmp_path / f"packed{suffix}"
    assert cli.main(["pack", *given, str(path), "--size", "32", "--batch", "2"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "features.1.0" in line]
    assert row.split()[2] == ("0.250" if "1of4" in network else "0.500")
    x = torch.randn(2, 3, 32, 32)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch\npath, folder = sys.argv[1:]\n"
        f"{LOAD[suffix]}\n"
        "with torch.inference_mode():\n"
        "    torch.save(model(torch.load(folder + '/x.pt')), folder + '/y.pt')\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain = fst.fold(trained_model(load_config(given[0]), given[1]).architecture).eval()
    with torch.no_grad():
        expected = plain(x)
    assert (torch.load(tmp_path / "y.pt") - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_unknown_suffix(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["pack", *files(NETWORKS[0]), str(tmp_path / "packed.onnx"), "--size", "32"])
    assert ".pt or .pt2" in capsys.readouterr().err
