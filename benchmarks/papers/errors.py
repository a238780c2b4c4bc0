"""The error of an approximate gradient against the exact one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Error(NamedTuple):
    """The error of an approximation a of e.

    Attributes:
        relative: ‖a − e‖ / ‖e‖.
        cosine: of the angle between a and e.
        norm: ‖a‖ / ‖e‖: below 1 where the approximation shrinks the gradient.
    """

    relative: float
    cosine: float
    norm: float


def error_of(approximate: Iterable[Tensor], exact: Iterable[Tensor]) -> Error:
    """The error of several tensors taken as one vector; sums in float64.

    Two vectors of zeros have no error and cosine 1; if one of them is zero the cosine is 0. Inf or
    NaN in either makes all three NaN.
    """
    difference = a_square = e_square = product = 0.0
    for a, e in zip(approximate, exact, strict=True):
        if a.shape != e.shape:
            raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(e.shape)}.")
        a, e = a.detach().double().flatten(), e.detach().double().flatten()
        sums = torch.stack([(a - e) @ (a - e), a @ a, e @ e, a @ e]).tolist()
        difference += sums[0]
        a_square += sums[1]
        e_square += sums[2]
        product += sums[3]
    if not all(map(math.isfinite, (a_square, e_square))):
        return Error(math.nan, math.nan, math.nan)
    if e_square == 0:
        return Error(0.0, 1.0, 1.0) if a_square == 0 else Error(math.inf, 0.0, math.inf)
    cosine = product / math.sqrt(a_square * e_square) if a_square else 0.0
    return Error(
        math.sqrt(difference / e_square),
        max(-1.0, min(1.0, cosine)),
        math.sqrt(a_square / e_square),
    )


def mean(errors: Sequence[Error]) -> Error:
    """The mean of each number, over batches."""
    return Error(*(sum(values) / len(errors) for values in zip(*errors, strict=True)))
