"""The page of products that leave zeros out; no speed is asserted."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fst.ops.cpp import missing

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which imports the others of its folder by name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("zeros")


def test_ratios_are_geometric_means_beside_the_control(zeros: ModuleType) -> None:
    """Torch's programs take 1 ms, the control 0.8, ours 0.5 and 0.125 in two layers."""
    layers = {}
    for group in (zeros.THREE, zeros.ONE):
        own = {name for name in group.programs if "SparseProp" not in name}
        layers[group] = {
            layer: {
                name: {"": 1.0, zeros.AGAIN: 0.8}.get(name.partition(", ")[2], time) for name in own
            }
            for layer, time in zip(group.layers, (0.5, 0.125), strict=False)
        }
    options = argparse.Namespace(batch=32, rounds=5, sparseprop=None)
    page = " ".join(zeros.page({2: layers, 1: layers}, options, None).split())
    assert "| W 2:4 | 4.00 | 4.00 |" in page and "the control | 1.25 | 1.25 |" in page
    assert "named no folder" in page and "| – | 4.00 |" in page


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
