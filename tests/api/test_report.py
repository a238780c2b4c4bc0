"""Reports of large models are short; frozen layers are neither computed nor paid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fst
from fst.api.report import LAYERS, LONG, backends_table, describe_layer
from fst.backends import sources
from fst.basics.text import table
from fst.layers import modules
from fst.layers.table import LayerTable
from fst.ops import cpp


def detector(blocks: int) -> nn.Module:
    """Names as a detector has them; the first block is frozen."""
    backbone = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(blocks)))
    backbone[0].requires_grad_(False)
    head = nn.ModuleDict({"cls": nn.Conv2d(8, 4, 1), "fc": nn.Linear(8, 4)})
    return nn.ModuleDict({"backbone": backbone, "neck": nn.Conv2d(8, 8, 1), "head": head})


def test_similar_layers_share_a_row_in_a_long_report():
    model = detector(LONG).double()  # float64: no kernel skips zeros
    text = str(fst.convert(model, "fst", include=nn.Conv2d))
    lines = text.splitlines()
    assert f"{LONG + 2} converted, 1 skipped" in lines[0]
    cells = [line.split() for line in lines]
    assert ["backbone.0", "8x8x3x3", "simulated", "simulated", "not", "computed"] in cells
    merged = f"backbone.* ({LONG - 1} layers) 8x8x3x3 simulated simulated may be accelerated"
    assert merged.split() in cells
    assert "head.cls 4x8x1x1 simulated simulated may be accelerated".split() in cells
    assert ["head.fc", "not", "included"] in cells
    assert "not computed: the weight needs no gradient" in lines
    assert len(text.partition("The C++ kernels are missing")[0].splitlines()) < LONG


def test_what_is_said_before_a_step_is_what_runs_in_it():
    """Without an input nobody knows the maps: "may be" then; a map of one position stays dense."""

    def model():
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, stride=4))

    def modes(reports):
        return [report.gemms["grad_weight"].mode for report in reports]

    images = torch.randn(2, 8, 6, 6)
    assert modes(fst.convert(model(), "fst").layers) == ["may be accelerated"] * 2
    net = model()
    report = fst.convert(net, "fst", example_input=images)
    assert modes(report.layers) == ["accelerated", "dense"]
    assert "the output map is too small" in report.layers[1].gemms["grad_weight"].reason
    net(images).sum().backward()
    assert modes(map(describe_layer, net)) == ["accelerated", "dense"]


@pytest.mark.parametrize(
    ("strategy", "autotune", "mode"),
    [
        ("sampled", "1", "dense"),  # far too small to gain
        ("sampled", "0", "accelerated"),
        ("fst_sampled", "1", "dense"),
        ("fst", "0", "accelerated"),
    ],
)
def test_with_an_example_the_report_says_what_runs(strategy, autotune, mode, monkeypatch, tmp_path):
    """Of linear layers too; weights, gradients and the random state stay as they are."""
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FST_AUTOTUNE", autotune)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(2), nn.Linear(16, 8))
    model[2].weight.requires_grad_(strategy != "sampled")
    images, state = torch.randn(2, 8, 6, 6), torch.get_rng_state()
    report = fst.convert(model, strategy, include="*", example_input=images)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(layer.transient.calls == layer.state.step == 0 for layer in (model[0], model[2]))
    said = [layer.gemms["grad_weight"].mode for layer in report.layers]
    assert said == [mode, "not computed" if strategy == "sampled" else mode]
    model(images).sum().backward()
    ran = [describe_layer(layer).gemms for layer in (model[0], model[2])]
    assert [gemms["grad_weight"].mode for gemms in ran] == said


def test_with_an_example_no_gradient_of_the_images_is_promised(monkeypatch):
    monkeypatch.setenv("FST_AUTOTUNE", "0")
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    images = torch.randn(2, 8, 8, 8)
    report = fst.convert(model, "sampled", grad_input=0.5, example_input=images)
    said = [layer.gemms["grad_input"].mode for layer in report.layers]
    assert said == ["not computed", "accelerated"]


def test_a_short_report_names_every_layer():
    report = fst.convert(detector(5), "sdgp", include=nn.Conv2d)
    assert all(f"\nbackbone.{i}" in str(report) for i in range(5))
    merged = LayerTable(report.layers).text(LAYERS, merged=True)
    assert merged.count("\n") == 5 and merged.count("4 layers") == 1


def test_layers_tell_which_backend_computed_what_and_why(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    report = fst.convert(model, "fst")
    assert report.layers[0].gemms["grad_weight"].decision is None
    assert backends_table(model).count("all 3") == 3
    model(torch.randn(2, 8, 6, 6)).sum().backward()
    decision = describe_layer(model[0]).gemms["grad_weight"].decision
    names = {"strided", "torch"} | ({"cpp"} if not cpp.missing() else set())
    assert set(decision.times) == names
    assert decision.backend in decision.times and decision.reason.startswith("measured")
    rows = [line.split("  ") for line in backends_table(model).splitlines()[2:]]
    cells = {tuple(cell.strip() for cell in row if cell.strip()) for row in rows}
    (measured,) = [row for row in cells if row[0] == "grad_weight" and row[2] == "0"]
    assert measured[1] == decision.backend
    assert measured[3] == decision.reason
    assert "strided" in measured[4] and "torch" in measured[4]
    if cpp.missing():
        reason = f"cpp: {cpp.missing()}; triton: {sources.triton_missing()}"
        assert ("prune_weight", "torch", "all 3", reason) in cells
    assert copy.deepcopy(model)[0].state.record == model[0].state.record


def test_merged_names_keep_the_numbers_that_agree():
    model = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in range(3)))
    report = fst.convert(model, "fst")
    assert "*.1 (3 layers)" in LayerTable(report.layers).text(LAYERS, merged=True)


def test_tables_in_markdown():
    assert table(("a", "bcde"), [(1, 2)], markdown=True) == (
        "| a   | bcde |\n| --- | ---- |\n| 1   | 2    |"
    )


@pytest.mark.parametrize("strategy", ["fst", "srste", "tsm", "wg"])
def test_a_frozen_weight_is_pruned_in_each_call_and_never_decays(strategy, monkeypatch):
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    model[0].requires_grad_(False)
    fst.convert(model, strategy, include="*")
    calls: list[int] = []
    convolve_pruned = modules.convolve_pruned

    def counted(input, weight, bias, plan, pruned, *given, **named):
        assert torch.count_nonzero(pruned.output) * 2 == pruned.output.numel()
        calls.append(weight.data_ptr())
        return convolve_pruned(input, weight, bias, plan, pruned, *given, **named)

    monkeypatch.setattr(modules, "convolve_pruned", counted)
    before = model[0].weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(1, 8, 9, 9)).sum().backward()
        optimizer.step()
    assert calls.count(model[0].weight.data_ptr()) == 3
    assert calls.count(model[1].weight.data_ptr()) == 3
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None
    assert model[0].state.step == 0
