"""tools/benchmark.py runs and reports what it measured; no speed is asserted."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import fst
from fst.backends import timing
from fst.backends.timing import compare, geometric_mean
from fst.basics.machine import processor
from fst.cli import main
from fst.cli.options.lab import bench
from fst.lab.benchmark import cli as tool
from fst.lab.benchmark.layers import LayerShape, layer_shapes, time_layer
from fst.lab.benchmark.measurements import Measurements, describe, measure, time_layers
from fst.lab.model import Training
from fst.ops import cpp
from tests.programs import ROOT, python

CPU = torch.device("cpu")
GEMMS = ("output", "grad_input", "grad_weight")


@pytest.mark.system
def test_report(tmp_path, capsys):
    out = tmp_path / "deep" / "report"
    arguments = "--batch 2 --size 32 --repeats 4 --strategies fst sdgp"
    arguments += " --measure layers steps"
    arguments += " --force-backends grad_weight=torch --processor-time"
    main(["bench", *arguments.split(), "--out", str(out)])
    text = out.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "geometric mean" in text and "training step" in text and "--repeats 4" in text
    report = json.loads(out.with_suffix(".json").read_text())
    header = report["header"]
    assert header["torch"] == torch.__version__ and header["autotuner"] == "off"
    assert "processor time of the process" in header["clock"]
    assert header["device"] == f"CPU, {processor()}"
    assert header["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert header["C++ kernels"] == (cpp.missing() or "built")
    for name in ("device", "instruction set", "C++ kernels"):
        assert f"| {name}" in text and header[name] in text
    assert sum(layer["count"] for layer in report["layers"]) == 20
    forced = "fst, grad_weight=torch"
    for layer in report["layers"]:
        # sdgp leaves the images' convolution dense
        names = {"torch", "fst", *([] if layer["layer"].startswith("3->") else ["sdgp"])}
        for gemm in GEMMS:
            assert set(layer["times"][gemm]) == names
            assert all(t["median"] > 0 for t in layer["times"][gemm].values())
        if "sdgp" in names:
            decided = layer["decisions"]["grad_input"]["sdgp"]["prune_grad_output"]
            assert decided["backend"] in ("cpp", "torch")
    assert set(report["steps"]["step"]) == {"torch", "fst", forced, "sdgp"}
    assert [of["rounds"] for of in (*report["layers"], report["steps"])] == [4] * 12
    assert text.count("of 4 rounds.") == 4  # under the tables of layers, and that of steps
    assert report["steps"]["failed"] == {}
    assert "backends chosen" in text


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "report")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--size", "32", "--out", out])
    assert ended.value.code == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.system
def test_a_model_by_name_needs_no_mmengine(tmp_path):
    """What `benchmarks/gpu_check.sh` runs on machines without it."""
    command = (
        "import sys; sys.modules.update(dict.fromkeys(('mmengine', 'mmcv', 'mmdet')));"
        "from fst.cli.commands import main; sys.exit(main(['bench', *sys.argv[1:]]))"
    )
    options = "--model timm:test_resnet --size 32 --batch 2 --repeats 1 --measure steps "
    options += f"--strategies dense --out {tmp_path}/out"
    python("-c", command, *options.split())
    assert (tmp_path / "out.md").is_file()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.system),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive),
    ],
    ids=["term", "int"],
)
def test_what_was_measured_is_written_when_it_is_stopped(number, status, tmp_path):
    """As by `timeout`, while layers are timed."""
    out = tmp_path / "report"
    arguments = "--measure layers --batch 2 --size 32 --repeats 3 --strategies fst --out".split()
    command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), *arguments, str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # pytest may run in the background of a shell, where SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if line.startswith("layer 3 "):
            process.send_signal(number)
            break
    process.stderr.read()
    assert process.wait() == status
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["incomplete"] == "stopped before its end"
    assert len(report["layers"]) >= 2 and not report["steps"]
    assert "incomplete" in out.with_suffix(".md").read_text()


def test_a_config_is_timed_at_the_size_asked_for(tmp_path):
    out = tmp_path / "report"
    options = "--batch 2 --size 8 12 --repeats 3 --measure steps --strategies fst".split()
    main(["bench", "--model", "configs/demo_digits.py", *options, "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["model"] == "configs/demo_digits.py"
    assert report["header"]["size"] == "8x12"
    assert set(report["steps"]["step"]) == {"torch", "fst"} and report["layers"] == []


def test_comparison_takes_turns_in_both_orders():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = compare(functions, repeats=2, device=torch.device("cpu"), warmup=1)
    assert "".join(calls) == "abc" + "abc" + "cba"
    assert timings.keys() == functions.keys()


def test_on_cuda_the_cache_is_flushed_before_the_events(monkeypatch):
    """With a stand-in for the device: what is called, in which order."""
    log = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: "Event") -> float:
            return 7.0

    def synchronize(device: torch.device) -> None:
        log.append("synchronize")
        time.sleep(0.05)

    monkeypatch.setattr(timing, "CACHE_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: log.append("flush"))
    done, returned = timing._cuda_clock(CPU)(lambda: log.append("call"))
    assert log == ["flush"] * timing.FLUSHES + ["record", "call", "record", "synchronize"]
    assert done == 7.0 and returned < 50


def test_shapes_are_counted_with_their_input():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    )
    shapes = layer_shapes(model, lambda: model(torch.zeros(5, 3, 17, 21)))
    assert [str(shape) for shape in shapes] == ["3->8 3x3 s2 17x21", "8->8 3x3 s1 8x10"]
    assert [shape.names for shape in shapes] == [["0"], ["1", "2"]]
    assert all(shape.size[0] == 5 for shape in shapes)


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_help_and_bad_arguments(capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", "--help"])
    assert done.value.code == 0 and "--strategies" in capsys.readouterr().out
    bad = [["--strategies", "fts"], ["--model", "resnet81"], ["--batch", "0"], ["--size", "x"]]
    bad += [["--strategies", "sampled,keeps=0.25"]]
    bad += [["--threads", "-3"], ["--measure", "speed"], ["--size", "1", "2", "3"]]
    bad += [["--layers", "all", "--model", "configs/demo_digits.py"]]
    bad += [["--force-backends", "grad_wait=triton"], ["--force-backends", "tritn"]]
    for arguments in bad:
        with pytest.raises(SystemExit):
            main(["bench", *arguments])
        error = capsys.readouterr().err
        assert arguments[0].strip("-") in error and arguments[1] in error
    with pytest.raises(SystemExit):
        main(["bench", "--model", "nowhere.py"])
    assert "config 'nowhere.py' does not exist" in capsys.readouterr().err


def test_the_defaults_are_announced_with_what_they_do(tmp_path, capsys, monkeypatch):
    """They compare the strategy whose backward pass saves work, and are done in about a minute."""
    options = bench().parse_args([])
    assert options.measure == ["steps"] and options.repeats is None
    assert options.strategies[:2] == ["dense", "sampled"]
    monkeypatch.setattr("fst.lab.benchmark.measurements.STEP_SECONDS", 0.0)
    said: list[str] = []

    def measured(training, options, found):
        said.append(capsys.readouterr().out)
        measure(training, options, found)

    monkeypatch.setattr(tool, "measure", measured)
    arguments = "--model timm:test_resnet --size 32 --batch 2 --strategies dense --out"
    assert main(["bench", *arguments.split(), str(tmp_path / "out")]) == 0
    (before,) = said
    for word in ("timm:test_resnet", "batch 2", "32x32", "times of steps", "dense"):
        assert word in before
    assert json.loads((tmp_path / "out.json").read_text())["steps"]["rounds"] == 3


def test_strategies_with_options():
    options = bench().parse_args(["--strategies", "sampled,keep=0.25,center=False", "dense"])
    assert options.strategies == ["sampled,keep=0.25,center=False", "dense"]


def test_layers_that_stay_dense_are_not_timed():
    """The first has too few channels, the last is excluded."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        nn.Conv2d(8, 16, 1),
    )
    images = torch.randn(2, 3, 8, 8)
    training = Training(model, lambda trained: trained(images).sum(), selection={"exclude": ["4"]})
    options = bench().parse_args(["--repeats", "1"])
    options.device = CPU
    found = Measurements()
    strategies = {"sdgp": fst.get_strategy("sdgp")}
    time_layers(training, options, strategies, found)
    tables = describe({"command": ""}, found).tables
    title = "output: dense time over strategy's time"
    (table,) = (table for table in tables if table.title == title)
    cells = [row[table.columns.index("sdgp")] for row in table.rows]
    assert [cell is not None for cell in cells[:3]] == [False, True, False]
    ratio, low, high = found.layers[1].ratios("output", "sdgp")
    assert low <= ratio <= high and cells[1] == f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    assert f"**{ratio:.2f}**" in tables[1].rows[-1]
    first, second, _ = found.as_json()["layers"]
    assert "sdgp" not in first["times"]["output"] and "sdgp" in second["times"]["output"]


def test_linear_layers_are_timed_as_linear_layers():
    """Those that would be converted, on tokens as the model sees them, against F.linear."""
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2))
    model = nn.ModuleDict({"stem": model, "mlp": nn.Linear(8, 16), "head": nn.Linear(16, 4)})
    tokens = torch.randn(2, 9, 8)
    shapes = layer_shapes(model, lambda: model["head"](model["mlp"](tokens).mean(1)), "linear")
    (shape,) = shapes
    assert shape.names == ["mlp"] and str(shape) == "8->16 linear, 9 tokens"
    strategies = {"fst": fst.get_strategy("fst")}
    times = time_layer(shape, strategies, device=CPU, dtype=torch.float32, repeats=2)
    assert all(set(times.times[gemm]) == {"torch", "fst"} for gemm in GEMMS)
    assert times.decisions["grad_weight"]["fst"]["grad_weight"].backend in ("cpp", "strided")


def test_a_layer_says_which_backends_computed_it():
    strategies = {name: fst.get_strategy(name) for name in ("fst", "srste")}
    shape = LayerShape(nn.Conv2d(4, 4, 3, padding=1), (2, 4, 6, 6), [""])
    layer = time_layer(shape, strategies, device=CPU, dtype=torch.float32, repeats=2)
    assert layer.decisions["grad_weight"]["fst"].keys() == {"grad_weight"}
    assert layer.decisions["grad_weight"]["fst"]["grad_weight"].backend == "strided"
    assert layer.decisions["grad_weight"]["srste"]["grad_weight"].backend == "dense"
    assert layer.decisions["output"]["srste"].keys() == {"prune_weight", "output"}
    for gemm in GEMMS:
        assert set(layer.times[gemm]) == {"torch", "fst", "srste"}
