"""The torch operators of the C++ kernels: schemas, fake results and compiled graphs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from fst.ops import cpp
from tests.campaign.operators import ALIKE, calls_of, registered

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")
def test_operators_agree_with_their_declarations():
    """Calls that random convolutions make, three of each at the most."""
    draw, checked = random.Random(0), Counter()
    for _ in range(60):
        for name, given in calls_of(draw).items():
            if name not in ALIKE.values() and checked[name] < 3:  # those need a GPU
                operator = getattr(torch.ops.fst, name)
                torch.library.opcheck(operator, tuple(given), test_utils=CHECKS)
                checked[name] += 1
    assert checked.keys() == registered() - {*ALIKE.values()}
