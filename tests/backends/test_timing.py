"""Races between candidates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from fst.backends import timing

CPU = torch.device("cpu")


def test_a_race_ends_when_one_is_the_fastest(monkeypatch):
    """Slow ones are out after their second run; a first run may be cold."""
    monkeypatch.setattr(timing, "ENOUGH", 1.5)
    clocks = {"cold": [9.0, 1.0, 1.2], "warm": [1.3, 1.1, 1.1], "slow": [2.0, 2.0], "broken": []}

    def clock(function: Callable[[], str]) -> tuple[float, float]:
        return clocks[function()].pop(0), 0.0

    monkeypatch.setattr(timing, "_host_clock", clock)
    functions = {name: functools.partial(str, name) for name in clocks}
    times, errors = timing.race(functions, 3, CPU, most=math.inf)
    assert times == {"cold": 1.0, "warm": 1.1, "slow": 2.0}
    assert [*errors] == ["broken"] and not any(clocks.values())
    clocks.update(cold=[2.0, 1.0, 1.0], warm=[1.0, 1.0, 1.0], slow=[3.0, 3.0])
    timing.race(functions, 9, CPU, most=2.5)
    assert clocks["warm"] == [1.0] and not clocks["slow"]
    clocks.update(cold=[0.5] * 4, warm=[0.5] * 4, slow=[2.0] * 4)
    timing.race(functions, 9, CPU, most=1.0)  # 0.5 ms are not enough
    assert not any(clocks.values())
    clocks.update(cold=[0.1] * 2, warm=[0.1] * 2, slow=[0.2] * 2)
    timing.race(functions, 9, CPU, most=1.0, negligible=0.3)
