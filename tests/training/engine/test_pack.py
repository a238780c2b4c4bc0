"""`fst pack` of trained networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fst
from fst.cli import main
from fst.ops.cpp import missing
from fst.training.engine.config import load_config
from fst.training.engine.trained import trained_model
from tests.programs import python

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")

LOAD = {
    ".pt": "model = torch.load(path, weights_only=False)",
    ".pt2": "import fst.ops; model = torch.export.load(path).module()",
}


@pytest.mark.system
@pytest.mark.parametrize(("n", "suffix"), [(2, ".pt"), (1, ".pt2")])
def test_another_process_runs_the_file(
    n: int, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, path = tmp_path / "srste.py", tmp_path / f"packed{suffix}"
    config.write_text(
        f'_base_ = "fst::configs/demo_digits.py"\nsparsity = dict(strategy="srste", n={n}, m=4)\n'
        "train_cfg = dict(max_epochs=1)\n"
    )
    assert main(["train", str(config), "--work-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    given = [str(config), str(tmp_path / "epoch_1.pth")]
    assert main(["pack", *given, str(path), "--size", "16", "--batch", "2"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "features.1.0" in line]
    assert row.split()[2] == f"{n / 4:.3f}"
    x = torch.randn(2, 1, 16, 16)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch\npath, folder = sys.argv[1:]\n"
        f"{LOAD[suffix]}\n"
        "with torch.inference_mode():\n"
        "    torch.save(model(torch.load(folder + '/x.pt')), folder + '/y.pt')\n"
    )
    python("-c", code, path, tmp_path)
    plain = fst.fold(trained_model(load_config(given[0]), given[1]).architecture).eval()
    with torch.no_grad():
        expected = plain(x)
    assert (torch.load(tmp_path / "y.pt") - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_unknown_suffix(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = ["fst::configs/demo_digits.py", __file__, str(tmp_path / "packed.onnx")]
    with pytest.raises(SystemExit):
        main(["pack", *given, "--size", "16"])
    assert ".pt or .pt2" in capsys.readouterr().err
