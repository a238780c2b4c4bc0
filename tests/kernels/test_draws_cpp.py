"""The C++ kernel that draws positions against the slow reference."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fst.ops import cpp
from fst.ops.positions.draw import draw_positions
from tests.kernels.values import with_threads
from tests.oracle.rules import reference_sample

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


ROOT = Path(__file__).resolve().parents[2]

numbers = st.one_of(
    st.floats(0, 100, width=32),
    st.sampled_from([0.0, 1.0, 1e-30, 1e30, math.inf, math.nan]),
)


@pytest.mark.each_isa
@given(st.lists(numbers, min_size=2, max_size=60), st.data())
def test_draw_is_the_references(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    scores = torch.tensor(values, dtype=torch.float32)
    start = data.draw(st.floats(0, 1, exclude_max=True))
    index, weight = draw_positions(scores, n, torch.tensor(start, dtype=torch.float64))
    assert len(index.unique()) == len(weight) == n
    wanted = reference_sample(scores.view(1, 1, 1, -1), n / len(scores), start).flatten()
    # An end may lie a few of 2^31 parts beside the reference's: then a neighbour is drawn.
    both = wanted[index.long()] > 0
    assert both.sum() >= n - 1
    shares = 1 / wanted[index.long()][both]
    assert ((1 / weight[both].double() - shares).abs() <= 2**-27 + 1e-6 * shares).all()


def test_all_starts_keep_each_position_as_often_as_its_weight_says():
    """Starts in between of which nothing changes are counted by their distance."""
    torch.manual_seed(1)
    scores = torch.randn(5000).exp()
    scores[17], scores[4000] = math.inf, 1000.0
    n = 1200

    def draw(start: float) -> tuple[Tensor, Tensor]:
        return draw_positions(scores, n, torch.tensor(start, dtype=torch.float64))

    grid = 4096
    often = torch.zeros(5000)
    share = torch.zeros(5000, dtype=torch.float64)
    for step in range(grid):
        index, weight = draw((step + 0.5) / grid)
        often[index.long()] += 1
        share[index.long()] = 1 / weight.double()
    assert (often / grid - share).abs().max() <= 1.5 / grid  # an interval of the length p
    assert share.sum() == pytest.approx(n, rel=1e-6)
    index, weight = draw(0.3)
    assert weight[index == 17] == 1 and weight[index == 4000] == 1


def test_draws_do_not_depend_on_threads():
    scores, start = torch.rand(40_000).square(), torch.tensor(0.4, dtype=torch.float64)
    found = [with_threads(t, draw_positions, scores, 9_999, start) for t in (1, 2, 7)]
    assert (found[0][0].diff() > 0).all()
    for index, weight in found[1:]:
        assert torch.equal(index, found[0][0]) and torch.equal(weight, found[0][1])


def test_draws_at_their_ends():
    start = torch.tensor(0.99, dtype=torch.float64)
    for scores, n in ((torch.rand(5), 5), (torch.rand(5), 9), (torch.empty(0), 0)):
        index, weight = draw_positions(scores, n, start)
        assert index.tolist() == list(range(len(scores))) and (weight == 1).all()
    for scores in (torch.zeros(6), torch.full((6,), 3.0)):
        assert torch.equal(draw_positions(scores, 2, start)[1], torch.full((2,), 3.0))
    index, _ = draw_positions(torch.rand(5), 0, start)
    assert len(index) == 0


WITHOUT_MEMORY = """
import resource, torch
from pathlib import Path
from fst.ops import cpp
from fst.ops.positions.draw import draw_positions
from tests.kernels.values import with_threads
assert cpp.missing() == ""
scores, start = torch.ones(8_000_000), torch.tensor(0.5, dtype=torch.float64)
draw_positions(scores[:100], 10, start)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**25  # the kernel wants 64 MB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    draw_positions(scores, 10, start)
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.system
def test_no_memory_is_an_exception():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT_MEMORY),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "fst_draw_positions: no memory for what it packs", done
