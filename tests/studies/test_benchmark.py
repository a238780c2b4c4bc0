"""tools/benchmark.py runs and reports what it measured; no speed is asserted."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fst
from fst.backends import timing
from fst.studies import benchmark
from fst.studies.analysis.runtime import layer_runtimes
from fst.studies.benchmark import breakdown, roofline
from fst.studies.benchmark import cli as tool
from fst.studies.benchmark.charts import layer_bars
from fst.studies.benchmark.measurements import Measurements, as_json, describe
from fst.studies.benchmark.run import strategy_of, time_layers

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GEMMS = ("output", "grad_input", "grad_weight")


@pytest.fixture
def _small_rates(monkeypatch):
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 256})


def test_report(tmp_path, capsys, _small_rates):
    out = tmp_path / "deep" / "report"
    arguments = "--batch 2 --size 32 --repeats 3 --classes 10 --strategies fst sdgp"
    arguments += " --backends --bandwidth 0.5 --sparse-tflops 2"
    tool.main([*arguments.split(), "--out", str(out)])
    text = out.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "geometric mean" in text and "training step" in text and "--repeats 3" in text
    report = json.loads(out.with_suffix(".json").read_text())
    header = report["header"]
    assert header["torch"] == torch.__version__ and header["autotuner"] == "off"
    assert header["bandwidth"] == "500 GB/s, given" and "2 TFLOP/s, given" in header["sparse rate"]
    assert "measured with a large matrix product in float32" in header["dense rate"]
    assert report["rates"]["bandwidth"] == 5e11 and report["rates"]["dense"] > 0
    assert sum(layer["count"] for layer in report["layers"]) == 20
    for layer in report["layers"]:
        # sdgp leaves the images' convolution dense
        names = {"torch", "fst", *([] if layer["layer"].startswith("3->") else ["sdgp"])}
        for gemm in GEMMS:
            assert set(layer["times"][gemm]) == names
            assert all(t["median"] > 0 for t in layer["times"][gemm].values())
            assert set(layer["bounds"][gemm]) >= names
        others = {a["forced"]["grad_weight"]: a for a in layer["alternatives"]}
        chosen = layer["decisions"]["grad_weight"]["fst"].get("grad_weight")
        if chosen is None:  # an output map of one position has no pairs
            assert not others and layer["layer"].split()[-1] in ("1x1", "2x2")
            continue
        named = {"strided", "transposed", "gemm", "product", "in_place", "masked"}
        assert {chosen["backend"], *others} == named
        for name, other in others.items():
            pointwise = " 1x1 " in layer["layer"]
            impossible = name != "strided" if pointwise else name in ("in_place", "product")
            assert (other["timing"] is None) == impossible == bool(other["reason"])
        if "sdgp" in names:
            decided = layer["decisions"]["grad_input"]["sdgp"]["prune_grad_output"]
            assert decided["backend"] == "torch"
    for measured in (report["steps"]["step"], report["memory"], report["breakdown"]):
        assert set(measured) == {"torch", "fst", "sdgp"}
    assert report["steps"]["failed"] == report["steps"]["host"] == {}
    assert all(used["peak"] > used["saved"] > 0 for used in report["memory"].values())
    assert "peak MiB" in text and "oneDNN" in text
    for section in ("backends chosen", "other backends", "roofline bound", "time of a step goes"):
        assert section in text
    assert "grad_weight=transposed not run for 64->128 1x1" in text
    for chart in ("report.png", "report_layers.png"):
        assert f"({chart})" in text
        assert (out.parent / chart).read_bytes().startswith(b"\x89PNG")


def test_op_as_a_user_calls_it(tmp_path, capsys):
    out = tmp_path / "op"
    arguments = "--op --batch 2 --size 32 --repeats 1 --classes 10 --strategies fst sampled"
    arguments += " --processor-time"
    tool.main([*arguments.split(), "--out", str(out)])
    assert "## op: dense time over" in (text := capsys.readouterr().out)
    assert "3x3, geometric mean" in text and "processor time of the process" in text
    report = json.loads(out.with_suffix(".json").read_text())
    assert not report["steps"] and not report["memory"] and report["rates"] is None
    for layer in report["layers"]:
        assert {*layer["times"]} == {"op"}
        assert {*layer["times"]["op"]} == {"torch", "fst", "sampled"}
    first = report["layers"][0]["decisions"]["op"]["fst"]
    assert first["grad_weight"]["backend"] == "strided"


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "report")
    with pytest.raises(SystemExit) as ended:
        tool.main(["--size", "32", "--out", out])
    assert ended.value.code == 2
    assert f"--out {out} cannot be written" in capsys.readouterr().err


def test_a_model_by_name_needs_no_mmengine(tmp_path):
    """What `benchmarks/gpu_check.sh` runs on machines without it."""
    command = (
        "import sys; sys.modules.update(dict.fromkeys(('mmengine', 'mmcv', 'mmdet')));"
        "from fst.cli import main; sys.exit(main(['bench', *sys.argv[1:]]))"
    )
    options = "--model timm:test_resnet --size 32 --batch 2 --repeats 1 --no-layers --no-compile "
    options += f"--no-profile --no-memory --strategies dense --device cpu --out {tmp_path}/out"
    done = subprocess.run(
        [sys.executable, "-c", command, *options.split()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.md").is_file()


def test_what_was_measured_is_written_when_it_is_stopped(tmp_path):
    """As by `timeout`, while layers are timed."""
    out = tmp_path / "report"
    arguments = "--batch 2 --size 32 --repeats 3 --no-profile --strategies fst --out".split()
    command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), *arguments, str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("layer 3 "):
            process.terminate()
            break
    process.stderr.read()
    assert process.wait() == 1
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["incomplete"] == "stopped before its end"
    assert len(report["layers"]) >= 2 and not report["steps"]
    assert "incomplete" in out.with_suffix(".md").read_text()


def test_a_config_is_timed_at_the_size_asked_for(tmp_path):
    out = tmp_path / "report"
    options = "--batch 2 --size 8 12 --repeats 3 --no-layers --strategies fst".split()
    tool.main(["--config", "configs/demo_digits.py", *options, "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["config"] == "configs/demo_digits.py"
    assert report["header"]["size"] == "8x12, padding included"
    assert set(report["steps"]["step"]) == {"torch", "fst"} and report["layers"] == []


def test_comparison_takes_turns_in_both_orders():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = benchmark.compare(functions, repeats=2, device=torch.device("cpu"), warmup=1)
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
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: log.append("flush"))
    done, returned = timing._cuda_clock(CPU)(lambda: log.append("call"))
    assert log == ["flush"] * timing.FLUSHES + ["record", "call", "record", "synchronize"]
    assert done == 7.0 and returned < 50


def test_shapes_are_counted_with_their_input():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    )
    shapes = benchmark.layer_shapes(model, lambda: model(torch.zeros(5, 3, 17, 21)))
    assert [str(shape) for shape in shapes] == ["3->8 3x3 s2 17x21", "8->8 3x3 s1 8x10"]
    assert list(shapes.values()) == [["0"], ["1", "2"]]
    assert all(shape.batch == 5 for shape in shapes)


@pytest.mark.parametrize(
    ("names", "category"),
    [
        (("aten::mkldnn_convolution", "aten::conv2d", "_SparseConv2d"), "convolution output"),
        (("aten::convolution_backward", "ConvolutionBackward0"), "convolution gradients"),
        (("aten::convolution", "_SparseConv2dBackward"), "convolution gradients"),
        (("aten::topk", breakdown.LAYER), "pruning, folding, copies"),
        (("aten::add", "_SparseConv2dBackward"), "pruning, folding, copies"),
        (("fst::prune_weights", "CompiledFunction"), "pruning, folding, copies"),
        (("fst::grad_weight", "CompiledFunctionBackward"), "convolution gradients"),
        (("fst::conv2d_24", breakdown.LAYER), "convolution output"),
        (("aten::native_batch_norm", "aten::batch_norm"), "batch norm"),
        (("triton_poi_fused_relu", "Torch-Compiled Region: 0/0"), "compiled code"),
        (("aten::add_", "torch::autograd::AccumulateGrad"), "decay, accumulation"),
        (("aten::add_", "Optimizer.step#SGD.step"), "optimizer"),
        (("aten::relu", breakdown.STEP), "other layers and loss"),
        ((breakdown.STEP,), "outside operators"),
    ],
)
def test_categories_of_operators(names, category):
    assert breakdown.category(names) == category


def test_geometric_mean():
    assert benchmark.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_help_and_bad_arguments(capsys):
    with pytest.raises(SystemExit) as done:
        tool.main(["--help"])
    assert done.value.code == 0 and "--strategies" in capsys.readouterr().out
    bad = [["--strategies", "fts"], ["--model", "resnet81"], ["--batch", "0"], ["--size", "x"]]
    bad += [["--threads", "-3"], ["--device", "quantum"], ["--size", "1", "2", "3"]]
    bad += [["--config", "nowhere.py"], ["--tflops", "0"], ["--bandwidth", "fast"]]
    bad += [[*option, "--config", "a.py"] for option in (["--layers", "all"], ["--classes", "7"])]
    bad += [["--force-backends", "grad_wait=triton"], ["--force-backends", "tritn"]]
    for arguments in bad:
        with pytest.raises(SystemExit):
            tool.main(arguments)
        error = capsys.readouterr().err
        assert arguments[0].strip("-") in error and arguments[1] in error


def test_strategies_with_options():
    options = tool.parser().parse_args(["--strategies", "sampled,keep=4,axis=both", "dense"])
    assert options.strategies == ["sampled,keep=4,axis=both", "dense"]
    made = strategy_of("fst,block=(2, 1),phase=random")
    assert made == fst.get_strategy("fst", block=(2, 1), phase="random")


def test_bad_options_of_strategies(capsys):
    with pytest.raises(SystemExit):
        tool.parser().parse_args(["--strategies", "sampled,keeps=4"])
    assert "has no option 'keeps'. Did you mean 'keep'" in capsys.readouterr().err


def test_layers_that_stay_dense_are_not_timed(_small_rates):
    """The first has too few channels, the last is excluded."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        nn.Conv2d(8, 16, 1),
    )
    images = torch.randn(2, 3, 8, 8)
    training = benchmark.Training(
        model, lambda trained: trained(images).sum(), selection={"exclude": ["4"]}
    )
    options = tool.parser().parse_args(["--repeats", "1", "--device", "cpu"])
    found = Measurements("cpu")
    strategies = {"sdgp": fst.get_strategy("sdgp")}
    time_layers(training, options, strategies, found)
    tables = describe({"command": ""}, found).tables
    for title in ("output: dense time over strategy's time", "output: share of the roofline bound"):
        (table,) = (table for table in tables if table.title == title)
        cells = [row[table.columns.index("sdgp")] for row in table.rows]
        assert [bool(cell) for cell in cells[:3]] == [False, True, False], title
    ratio = found.layers[1].ratio("output", "sdgp")
    assert cells and f"**{ratio:.2f}**" in tables[1].rows[-1]
    assert layer_bars(found).axes
    report = as_json({}, found)
    first, second, _ = layer_runtimes(report)
    assert first.times["sdgp"] == first.times["torch"]
    assert second.times["sdgp"] != second.times["torch"]


def test_linear_layers_are_timed_as_linear_layers():
    """Those that would be converted, on tokens as the model sees them, against F.linear."""
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2))
    model = nn.ModuleDict({"stem": model, "mlp": nn.Linear(8, 16), "head": nn.Linear(16, 4)})
    tokens = torch.randn(2, 9, 8)
    shapes = benchmark.layer_shapes(
        model, lambda: model["head"](model["mlp"](tokens).mean(1)), "linear"
    )
    ((shape, names),) = shapes.items()
    assert names == ["mlp"] and str(shape) == "8->16 linear, 9 tokens"
    times = benchmark.time_layer(
        shape,
        1,
        {"fst": fst.get_strategy("fst")},
        device=CPU,
        dtype=torch.float32,
        memory_format=torch.channels_last,
        repeats=2,
    )
    assert all(set(times.times[gemm]) == {"torch", "fst"} for gemm in GEMMS)
    assert times.decisions["grad_weight"]["fst"]["grad_weight"].backend == "product"
