"""Timings that a test decides: no function is measured, each runs once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fst.backends.timing import Timing

BY_ZEROS = {  # over pixels before images
    **{"library": 9.0, "zeros, over images": 2.0, "zeros, over pixels": 1.0},
    **{"one by one": 2.0, "in one go": 1.0, "depthwise kernel": 1.0, "packed, bfloat16": 9.0},
    **{"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 4.0},
}


def rank(monkeypatch: pytest.MonkeyPatch, ranks: Mapping[str, float]) -> None:
    """Give what `fst.pack` times these milliseconds."""

    def compare(functions: dict, *_: object, **__: object) -> dict[str, Timing]:
        for function in functions.values():
            function()
        return {name: Timing(*[ranks.get(name, 9.0)] * 3) for name in functions}

    for module in ("fst.inference.choosing", "fst.api.pack"):
        monkeypatch.setattr(f"{module}.compare", compare)
