"""What a step costs the host where Triton's kernels prune: their launches, and Python calls."""

from __future__ import annotations

import importlib.util

import pytest

from tests.layers.python_calls import counted_by

LIMITS = {  # strategy -> Python calls of a layer beyond those of torch.nn.Conv2d, launches
    "srste": (42, 1),
    "fst_w": (64, 1),
    "sdgp": (57, 3),
    "sdgp,rule=magnitude": (52, 1),
    "fst": (92, 1),
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def counted() -> dict[str, list[float]]:
    return counted_by("kernel_calls")


@pytest.mark.parametrize("strategy", LIMITS)
def test_a_layers_step_takes_few_launches_and_calls(strategy, counted):
    calls, launches = counted[strategy]
    most_calls, most_launches = LIMITS[strategy]
    assert calls <= most_calls
    assert most_launches - 1 < launches <= most_launches  # the first layer has no dX
