"""What tests look at in the groups of a mask."""

from __future__ import annotations

from torch import Tensor


def kept_counts(mask: Tensor, m: int, dim: int) -> list[tuple[int, int]]:
    """(number kept, group length) of every group of ``m`` along ``dim``."""
    lines = mask.movedim(dim, -1).reshape(-1, mask.shape[dim])
    return [
        (int(group.sum()), len(group)) for line in lines for group in line.split(m) if len(line)
    ]
