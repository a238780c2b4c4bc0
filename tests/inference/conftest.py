"""For tests of `fst.pack`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.inference.ranks import BY_ZEROS, rank


@pytest.fixture
def by_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by zeros are the fastest."""
    rank(monkeypatch, BY_ZEROS)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
