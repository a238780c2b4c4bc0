"""Timings that a test decides: no function is measured, each runs once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fst.backends import store
from fst.backends.timing import Timing

BY_ZEROS = {  # over pixels before images
    **{"dense": 9.0, "zeros_images": 2.0, "zeros_pixels": 1.0},
    **{"unfused": 2.0, "depthwise": 1.0, "packed, bfloat16": 9.0},
    **{"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 4.0},
}


def rank(monkeypatch: pytest.MonkeyPatch, ranks: Mapping[str, float]) -> None:
    """Give what `fst.pack` times these milliseconds; nothing is read from or written to a disk."""

    def race(functions: dict, *_: object) -> tuple[dict[str, float], dict[str, Exception]]:
        for function in functions.values():
            function()
        return {name: ranks.get(name, 9.0) for name in functions}, {}

    def compare(functions: dict, *_: object, **__: object) -> dict[str, Timing]:
        times, _ = race(functions)
        return {name: Timing(*[time] * 3) for name, time in times.items()}

    monkeypatch.delenv("FST_AUTOTUNE", raising=False)
    monkeypatch.setattr("fst.backends.timing.race", race)
    monkeypatch.setattr("fst.api.pack.compare", compare)
    monkeypatch.setattr(store, "known", lambda *_: {})
    monkeypatch.setattr(store, "add", lambda *_: None)
