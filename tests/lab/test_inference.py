"""`fst bench --infer`; no speed is asserted."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from fst.backends.timing import Timing
from fst.cli import main
from fst.inference.packed import packed_layers
from fst.lab.benchmark import inference
from fst.ops.cpp import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")


ROOT = Path(__file__).resolve().parents[2]


def refused(*_: object) -> None:
    raise RuntimeError("no compiler\nin many lines")


@pytest.mark.system
def test_candidates_are_timed_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(inference, "_frozen", refused)
    out = tmp_path / "infer"
    given = "--infer timm:test_resnet --batch 1 --size 32 --repeats 3 --threads 1 --out"
    assert main(["bench", *given.split(), str(out)]) == 0
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out
    found = json.loads(out.with_suffix(".json").read_text())
    assert [(one["batch"], one["threads"]) for one in found["found"]] == [(1, 1)]
    for one in map(inference.Inference.from_json, found["found"]):
        assert {*one.times, *one.missing} == set(inference.CANDIDATES)
        assert one.missing.pop(inference.FROZEN) == "RuntimeError: no compiler"
        assert "fst-train[bench]" in one.missing.pop(inference.OPENVINO, "fst-train[bench]")
        assert not one.missing and set(one.times) == set(one.differences)
        exact = set(one.times) - {inference.ORT_INT8}
        assert max(one.differences[name] for name in exact) < 1e-4
    assert (
        found["header"]["onnxruntime"]
        and found["header"]["instruction set"]
        and found["header"]["command"].startswith("fst bench")
    )


def measured(packed: float = 2.0) -> inference.Inference:
    times = {"torch": 8.0, inference.FROZEN: 6.0, inference.ORT: 4.0, inference.ORT_INT8: 1.0}
    times["2:4 packed"] = packed
    timings = {name: Timing(*[time] * 3) for name, time in times.items()}
    missing = {inference.OPENVINO: "ModuleNotFoundError: openvino"}
    return inference.Inference(1, 2, timings, dict.fromkeys(times, 1e-6), missing)


def test_ratios_are_to_the_fastest_rival() -> None:
    document = inference.describe_inference({"command": "fst bench"}, [measured()])
    rows = {row[0]: row[2:4] for row in document.tables[1].rows}
    assert rows["2:4 packed"] == ["4.00", "2.00"] and rows[inference.FROZEN] == ["1.33", "0.67"]
    assert document.notes == ["OpenVINO, float32: not run. ModuleNotFoundError: openvino"]


def test_our_dense_kernel_runs_everywhere_it_can() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    found: list[nn.Module] = []
    pack = inference.pack
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(inference, "pack", lambda *given: found.append(pack(*given)) or found[0])
        inference._own_kernel(model, torch.randn(4, 4, 8, 8))(torch.randn(4, 4, 8, 8))
    runs = [layer.plans.decision.backend for layer in packed_layers(found[0]).values()]
    assert len(runs) == 2 and all(run.startswith("zeros") for run in runs)


@pytest.mark.parametrize("option", ["--batch", "--threads"])
def test_several_numbers_are_for_inference(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["bench", option, "1", "2"])
    assert "--infer" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dtype bfloat16", "--layers all", "--strategies srste"])
def test_options_of_training_steps_are_refused(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--infer", "resnet18", *option.split()])
    assert f"error: {option.split()[0]} " in capsys.readouterr().err


def test_the_page_says_where_rivals_win(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "inference.py"))
    fast, slow = script["Case"]("resnet18:16"), script["Case"]("resnet50:16")
    header = {"instruction set": "AVX2", "command": "fst bench", "threads": 2}
    for case, packed, commit in ((fast, 2.0, "abc"), (slow, 5.0, "def")):
        data = {"header": header | {"commit": commit}, "found": [measured(packed).as_json()]}
        case.file(tmp_path).write_text(json.dumps(data))
    cases = [fast, slow, script["Case"]("vgg16:4")]
    document = script["page"](cases, tmp_path, "python benchmarks/inference.py")
    assert [row[4] for row in document.tables[0].rows] == ["2.00", "0.80"]
    first, _, third, _ = document.description.splitlines()
    assert first.endswith(
        "2:4 packed here: resnet18, batch 16, 2 threads; resnet50, batch 16, 2 threads."
    )
    assert third == "- Dense float32 is faster than 2:4 packed here: resnet50, batch 16, 2 threads."
    assert "commit abc (resnet18, batch 16); def (resnet50, batch 16)" in document.made_with
    assert document.notes[0] == "vgg16:4: not measured" and "OpenVINO" in document.notes[1]


@pytest.mark.system
def test_the_script_fails_with_a_case(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "inference.py"))
    where = ["--out", str(tmp_path), "--page", str(tmp_path / "page.md")]
    with pytest.raises(SystemExit, match="not measured.*nonsense:2"):
        script["main"](["--cases", "nonsense:2", *where])
    assert "nonsense:2: not measured" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("case", ["resnet18", ":16", "resnet18:", "resnet18:0", "resnet18:-1"])
def test_a_case_has_a_name_and_a_batch(case: str, capsys: pytest.CaptureFixture) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "inference.py"))
    with pytest.raises(SystemExit):
        script["main"](["--cases", case])
    assert f"{case!r} is not NAME:BATCH" in capsys.readouterr().err
