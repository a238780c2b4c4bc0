"""`fst bench --infer`; no speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fst.backends.timing import Timing
from fst.lab.benchmark import cli, inference
from fst.layers.packed import LIBRARY, PackedLayer
from fst.ops.cpp.library import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")


def refused(*_: object) -> None:
    raise RuntimeError("no compiler\nin many lines")


def test_candidates_are_timed_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(inference, "_frozen", refused)
    out = tmp_path / "infer"
    given = "--infer timm:test_resnet --batch 1 2 --size 32 --repeats 3 --out"
    assert cli.main([*given.split(), str(out)]) == 0
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out
    found = json.loads(out.with_suffix(".json").read_text())
    ran = {"torch", "ONNX Runtime, float32", "ONNX Runtime, int8", "dense, our kernel"}
    assert {batch: set(times) for batch, times in found["times"].items()} == {
        batch: ran | {"2:4 packed", "1:4 packed"} for batch in ("1", "2")
    }
    assert found["missing"] == {"torch.compile, freezing": "RuntimeError: no compiler"}
    assert found["header"]["instruction set"] and found["header"]["command"].startswith("fst bench")


def test_ratios_are_to_the_faster_rival() -> None:
    times = {"torch": 8.0, inference.FROZEN: 6.0, inference.ORT: 4.0, inference.ORT_INT8: 1.0}
    times["2:4 packed"] = 2.0
    document = inference.describe_inference(
        {"command": "fst bench"}, {1: {n: Timing(t, t, t) for n, t in times.items()}}, {}
    )
    rows = {row[0]: row[2:] for row in document.tables[1].rows}
    assert rows["2:4 packed"] == ["4.00", "2.00"] and rows[inference.FROZEN] == ["1.33", "0.67"]


def test_our_dense_kernel_runs_everywhere_it_can() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    found: list[PackedLayer] = []
    pack = inference.pack
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(inference, "pack", lambda *given: found.append(pack(*given)) or found[0])
        inference._own_kernel(model, torch.randn(4, 4, 8, 8))()
    layers = [layer for layer in found[0].modules() if isinstance(layer, PackedLayer)]
    assert len(layers) == 2 and all(not layer.only_library for layer in layers)
    assert all(LIBRARY not in layer.chosen.values() for layer in layers)


def test_several_batch_sizes_are_for_inference(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--batch", "1", "2"])
    assert "--infer" in capsys.readouterr().err
