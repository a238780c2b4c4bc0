"""tools/benchmark.py runs and reports what it measured; no speed is asserted."""

import json

import pytest
import torch
from torch import nn

import fst
from fst import benchmark
from fst.benchmark import Training
from fst.memory import measure_memory, saved_bytes
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
    for measured in (report["steps"]["step"], report["memory"]):
        assert set(measured) == {"torch", "dense", "fst", "sdgp"}
    assert all(used["peak"] > used["saved"] > 0 for used in report["memory"].values())
    assert "peak MiB" in text and "oneDNN" in text


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


def test_shapes_are_counted_with_their_input():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    )
    shapes = benchmark.conv_shapes(model, lambda: model(torch.zeros(5, 3, 17, 21)))
    assert [str(shape) for shape in shapes] == ["3->8 3x3 s2 17x21", "8->8 3x3 s1 8x10"]
    assert list(shapes.values()) == [1, 2]
    assert all(shape.batch == 5 for shape in shapes)


def a_training(model: nn.Module, images: torch.Tensor, **options) -> Training:
    return Training(model, lambda trained: trained(images).square().mean(), **options)


def test_memory_is_that_of_model_optimizer_and_step():
    """A model so large, on an image so small, that activations do not count."""
    model = nn.Sequential(nn.Conv2d(64, 256, 3), nn.Conv2d(256, 256, 3))
    weights = sum(p.numel() for p in model.parameters()) * 4
    training = a_training(model, torch.randn(1, 64, 5, 5))
    strategies = {name: fst.get_strategy(name) for name in ("dense", "srste")}
    memory = measure_memory(training, strategies)
    assert memory.keys() == {"torch", "dense", "srste"}
    # weights, gradients, momentum, and what the optimizer and the convolutions need besides
    assert 3 * weights <= memory["torch"].peak < 5 * weights
    assert memory["srste"].peak >= memory["dense"].peak + weights
    assert all(p.grad is None for p in model.parameters())


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    images = torch.randn(4, 8, 6, 6)
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1))
    image = images.numel() * 4
    training = a_training(model, images)
    plain, step = training.contestant(None)
    # the convolutions' inputs, and the last output for the loss
    assert saved_bytes(plain, step) == 3 * image
    trained, step = training.contestant(fst.get_strategy("fst_w"))
    assert saved_bytes(trained, step) == 3 * image + (64 + 64 * 9) * 4  # S(Wᵀ)
    trained, step = training.contestant(fst.get_strategy("fst"))
    # of the 1x1 convolution's input only the kept half; ReLU keeps nothing, its input needs none
    assert saved_bytes(trained, step) == 2.5 * image + (64 + 64 * 9) * 4


def test_contestants_train_copies_and_convert_what_is_selected():
    model = nn.ModuleDict({"body": nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))})
    before = model["body"][0].weight.clone()
    training = Training(
        model,
        lambda trained: trained["body"](torch.ones(1, 4, 7, 7)).sum(),
        root=lambda trained: trained["body"],
        selection={"exclude": "0"},
    )
    trained, step = training.contestant(fst.get_strategy("fst"))
    step()
    assert set(fst.sparse_layers(trained)) == {"body.1"} and not fst.sparse_layers(model)
    assert torch.equal(model["body"][0].weight, before)
    assert not torch.equal(trained["body"][0].weight, before)
    assert all(p.grad is None for p in trained.parameters())


def test_geometric_mean():
    assert benchmark.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_help_and_bad_arguments(capsys):
    with pytest.raises(SystemExit) as done:
        tool.main(["--help"])
    assert done.value.code == 0 and "--strategies" in capsys.readouterr().out
    bad = [["--strategies", "fts"], ["--model", "resnet81"], ["--batch", "0"], ["--size", "x"]]
    bad += [["--threads", "-3"], ["--device", "quantum"], ["--size", "1", "2", "3"]]
    bad += [["--config", "nowhere.py"]]
    for arguments in bad:
        with pytest.raises(SystemExit):
            tool.main(arguments)
        error = capsys.readouterr().err
        assert arguments[0].strip("-") in error and arguments[1] in error
