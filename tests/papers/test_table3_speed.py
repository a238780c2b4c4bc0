"""benchmarks/papers/table3_speed.py: systems' steps, their zeros, and the page."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import fst
from fst.backends import Decision
from fst.ops import cpp

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "papers" / "table3_speed.py"
PLACE = {"device": "CPU, some", "instruction set": "AVX2", "C++ kernels": "built"}
MADE = {
    "network": "resnet18",
    "batch": 4,
    "epochs": 2,
    "images": 8,
    "threads": 2,
    "made with": {**PLACE, "torch": "2.11"},
}
SMALLER = "PruneTrain, 30 % of the channels gone"
ZEROS = {  # of a small network, by multiply-adds: product, operand, least and most
    "SR-STE": ("output", "W", 0.4, 0.6),
    "DPF": ("output", "W", 0.3, 0.7),
    "ClickTrain": ("grad_input", "W", 0.3, 0.8),
    "meProp": ("grad_weight", "dY", 0.4, 1),
    "SDGP 4:32": ("grad_input", "dY", 0.4, 1),
    "SparseTrain": ("grad_weight", "X", 0.2, 0.8),
}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(FILE))


def test_each_system_is_timed_and_described(script, tmp_path):
    subject = script["from_config"].__globals__["from_name"](
        "timm:test_resnet", classes=10, size=32, batch_size=4
    )
    systems = {name: script["SYSTEMS"][name] for name in (script["CONTROL"], SMALLER, *ZEROS)}
    timed = script["measure"](script["of_tested"](subject), systems, 1)
    assert list(timed) == list(systems)
    for name, found in timed.items():
        assert len(found["ms"]) == len(found["torch ms"]) == 1
        assert all(0 <= share < 1 for share in found["left out"].values()), name
    assert timed[script["CONTROL"]]["left out"]["all"] == 0
    assert timed[SMALLER]["left out"]["all"] > 0.3
    for name, (gemm, operand, least, most) in ZEROS.items():
        assert cpp.missing() or least < timed[name]["zeros"][gemm][operand] < most, name
    systems = {name: {**found, "commit": "abc"} for name, found in timed.items()}
    (tmp_path / "some.json").write_text(json.dumps({**MADE, "systems": systems}))
    speed, products = script["describe"](tmp_path, ["resnet18"]).tables
    assert {row[0] for row in speed.rows} == {row[0] for row in products.rows} == set(systems)
    rows = {row[0]: dict(zip(speed.columns, row, strict=True)) for row in speed.rows}
    assert rows["SR-STE"]["paper"] == "1.2"


@pytest.mark.parametrize(
    ("gemm", "backend", "kept"),
    [
        ("output", "zeros_weight", 0.5),
        ("output", "zeros_input", 0.75),
        ("grad_input", "zeros_weight", 0.25),
        ("grad_weight", "cpp_lists", 0.5),
        ("grad_weight", "listed_zeros", 0.375),
    ],
)
def test_multiply_adds_that_a_backend_does(script, gemm, backend, kept):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3))
    fst.convert(model, "fst_sampled")
    record = model[0].state.record
    record.shares.update(weight=4, transposed=6, input=2)
    record.decisions[gemm] = Decision(gemm, backend, "", {}, "something")
    assert script["_kept"](model[0], gemm) == kept
    record.decisions[gemm] = Decision(gemm, "dense", "", {})
    assert script["_kept"](model[0], gemm) == 1


def test_results_of_another_batch_are_not_mixed(script, tmp_path, capsys):
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    threads = torch.get_num_threads()
    found = {**MADE, "images": 1200, "threads": threads, "systems": {}}
    (tmp_path / f"resnet18_{capability}.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        script["main"](["resnet18", "--batch", "8", "--work-dir", str(tmp_path)])
    assert "--batch 8" in capsys.readouterr().err
