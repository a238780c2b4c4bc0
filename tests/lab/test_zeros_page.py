"""The page of products that leave zeros out; no speed is asserted."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fst.ops.cpp.library import missing

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which imports the others of its folder by name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("zeros")


def found(zeros: ModuleType) -> object:
    """Torch's programs take 1 ms, the control 0.9, all others 0.4 or 0.1."""
    layers = {}
    for group in (zeros.THREE, zeros.ONE):
        times = dict.fromkeys(group.programs, 0.4)
        for name in times:
            product, _, rest = name.partition(", ")
            times[name] = {"": 1.0, zeros.zeros_page.AGAIN: 0.9}.get(rest, times[name])
            if rest.endswith(("lists", "empty")):
                times[name] = 0.1
        layers[group] = {group.layers[0]: times}
    step = {"torch": 1000.0, "srste": 800.0, "lists": 25.0}
    return zeros.Found(layers, 20.0, step)


def test_goals_are_bold_where_they_are_reached_beyond_the_control(
    zeros: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    options = argparse.Namespace(batch=32, rounds=5, layers=None, sparseprop=None)
    page = " ".join(
        zeros.zeros_page.page({2: found(zeros), 1: found(zeros)}, options, None).split()
    )
    assert "2.50 | **1.6** | 2.50" in page  # Y, W 2:4
    assert "2.50 | 2.5 |" in page  # dX, dY 4:32: 2.5 / 1.11 is too little
    assert "ResNet-18, dX, dY 4:32: 2.50, the control 1.11, instead of 2.5: packing" in page
    assert "| 3.1% | 3%" in page  # the lists of a step
    assert "named no folder" in page and "| –" in page


@pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")
def test_programs_compute_the_products_that_they_are_named_by(zeros: ModuleType) -> None:
    made = zeros.programs(zeros.Layer(8, 16, 6, 3, 2), 4, None)
    groups = (zeros.THREE, zeros.ONE)
    wanted = {name for group in groups for name in group.programs if "SparseProp" not in name}
    assert wanted <= set(made)
    outputs = [made[name]() for name in ("Y", "Y, W dense", "Y, W 50 %")]
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in outputs)
    torch.testing.assert_close(*outputs[:2])
    torch.testing.assert_close(made["dX, W dense"](), made["dX"]()[0])
    torch.testing.assert_close(made["dX, dY dense"](), made["dX"]()[0])
    torch.testing.assert_close(made["dW, X half"](), made["dW"]()[1], atol=1e-4, rtol=1e-4)
    assert not made["Y, W empty"]().any() and not made["dX, W empty"]().any()


def test_most_of_a_networks_step_are_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    steps = importlib.import_module("steps")
    network = steps.Network("", ("--model", "resnet18", "--batch", "2"), {})
    assert 0.3 < steps.share_of_products(network) < 1
