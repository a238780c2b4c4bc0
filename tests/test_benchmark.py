"""tools/benchmark.py runs and reports what it measured; no speed is asserted."""

import json

import pytest
import torch
from torch import nn

from fst import benchmark
from tools import benchmark as tool


def test_report(tmp_path, capsys):
    out = tmp_path / "deep" / "report"
    arguments = "--batch 2 --size 32 --repeats 3 --classes 10 --strategies dense fst sdgp".split()
    tool.main([*arguments, "--out", str(out)])
    text = out.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "geometric mean" in text and "training step" in text and "--repeats 3" in text
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["torch"] == torch.__version__
    assert sum(layer["count"] for layer in report["layers"]) == 20
    for layer in report["layers"]:
        for gemm in ("output", "grad_input", "grad_weight"):
            assert set(layer["times"][gemm]) == {"torch", "dense", "fst", "sdgp"}
            assert all(t["median"] > 0 for t in layer["times"][gemm].values())
        assert layer["programs"].keys() == {"fst"}
    assert set(report["steps"]["step"]) == {"torch", "dense", "fst", "sdgp"}


def test_comparison_takes_turns_in_both_orders():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = benchmark.compare(functions, repeats=2, device=torch.device("cpu"), warmup=1)
    assert "".join(calls) == "abc" + "abc" + "cba"
    assert timings.keys() == functions.keys()


def test_shapes_are_counted_with_their_input():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    )
    shapes = benchmark.conv_shapes(model, torch.zeros(5, 3, 17, 21))
    assert [str(shape) for shape in shapes] == ["3->8 3x3 s2 17x21", "8->8 3x3 s1 8x10"]
    assert list(shapes.values()) == [1, 2]
    assert all(shape.batch == 5 for shape in shapes)


def test_geometric_mean():
    assert benchmark.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_help_and_bad_arguments(capsys):
    with pytest.raises(SystemExit) as done:
        tool.main(["--help"])
    assert done.value.code == 0 and "--strategies" in capsys.readouterr().out
    bad = [["--strategies", "fts"], ["--model", "resnet81"], ["--batch", "0"], ["--size", "x"]]
    bad += [["--threads", "-3"], ["--device", "quantum"]]
    for arguments in bad:
        with pytest.raises(SystemExit):
            tool.main(arguments)
        error = capsys.readouterr().err
        assert arguments[0] in error and arguments[1] in error
