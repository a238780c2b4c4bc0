"""The distance of outputs from those that are expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def difference(found: Any, expected: Any) -> float | None:
    """The largest `relative_difference` of the tensors in two outputs.

    Returns:
        None where no output is a tensor; infinity where the outputs do not correspond.
    """
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return math.inf
    pairs = [pair for pair in zip(ours, theirs, strict=True) if isinstance(pair[1], Tensor)]
    apart = [relative_difference(*pair) for pair in pairs]
    return math.nan if any(map(math.isnan, apart)) else max(apart, default=None)


def relative_difference(found: object, expected: object) -> float:
    """The largest difference over the largest value; infinite where there is no number for it.

    Equal infinities do not differ, nor does NaN from NaN; NaN from a number differs by NaN.
    """
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return 0.0 if found == expected else math.inf
    if found.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if bool((found == expected).all()) else math.inf
    wide = torch.promote_types(expected.dtype, torch.float64)
    found, expected = found.to(wide), expected.to(wide)
    sizes = expected[expected.isfinite()].abs()
    differs = (found != expected) & ~(found.isnan() & expected.isnan())
    differences = (found - expected).abs()[differs]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    difference = float(differences.max()) if differences.numel() else 0.0
    return difference / (largest or 1.0)
