"""What a layer's training step costs the host, counted in Python calls instead of in times."""

from __future__ import annotations

import pytest

from fst.ops import cpp
from tests.layers.python_calls import counted_by

LIMITS = {  # strategy -> calls of a layer in rows "small" and "wide" of python_calls.py
    "dense": {"small": 15, "wide": 16},
    "srste": {"small": 31, "wide": 60},
    "fst_w": {"small": 54, "wide": 60},
    "sdgp": {"small": 50, "wide": 49},
    "fst": {"small": 79, "wide": 82},
    "sampled": {"small": 83, "wide": 83},
    "fst_sampled": {"small": 94, "wide": 98},
}

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, float]]:
    return counted_by("python_calls")


@pytest.mark.parametrize("strategy", LIMITS)
@pytest.mark.parametrize("row", ["small", "wide"])
def test_a_layers_step_takes_at_most_so_many_calls(row, strategy, counted):
    assert counted[row][strategy] <= LIMITS[strategy][row]
