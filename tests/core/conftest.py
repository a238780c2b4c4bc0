"""Backends that cannot run here, replaced."""

import dataclasses

import pytest

from fst.backends import registry
from fst.ops import triton as ops
from tests.core.stand_in import PruneWeight, stand_ins

KERNELS = dict.fromkeys(("prune_weight", "prune_grad_output", "fold_grad_output"), "triton")


@pytest.fixture
def triton_usable(monkeypatch) -> dict[str, str]:
    """As if Triton's kernels could run here; returns how to `force` them."""
    for key in KERNELS.items():
        usable = dataclasses.replace(registry._BACKENDS[key], missing=lambda: "")
        monkeypatch.setitem(registry._BACKENDS, key, usable)
    return KERNELS


@pytest.fixture
def stand_in(monkeypatch, triton_usable) -> PruneWeight:
    """Kernels are replaced; returns what prunes weights."""
    kernels = stand_ins()
    monkeypatch.setattr(ops, "_kernels", kernels.__getitem__)
    return kernels["prune_weight"]
