"""Bias of an approximate weight gradient: its mean over batches against the mean of the exact one.

The error of a single gradient does not tell what averages out over a training from what stays.
FST's Eq. 10, for instance, replaces the exact gradient A[k] along the kernel's width by
(A[k] + A[k−1])/2, a low-pass filter and half a pixel of shift, whatever the batch: so the bias is
split by what the filter does, the kernel's mean, slope and curvature along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from errors import error_of
from torch import Tensor

WHOLE = "whole"
DEGREES = ("mean", "slope", "curvature")
AXES = {"kw": 3, "kh": 2}
PARTS = (WHOLE, *(f"{degree} along {axis}" for axis in AXES for degree in DEGREES))


class Bias(NamedTuple):
    """Distance of the mean ā of an approximation over n batches from the exact gradient's, ē.

    Attributes:
        relative: ‖ā − ē‖ / ‖ē‖.
        chance: the relative error that is expected of n batches without any bias: the standard
            error of the mean difference over ‖ē‖; NaN for one batch. Where ē itself is little more
            than noise, as in a trained network, a filter passes that noise, and neither number
            tells it from chance; ``gain`` does.
        cosine: of the angle between ā and ē.
        gain: Σ⟨a, e⟩ / Σ‖e‖² over the batches, the share of the exact gradient that comes through:
            1 if a is unbiased given each batch.
        deviation: standard error of ``gain``; NaN for one batch.
    """

    relative: float
    chance: float
    cosine: float
    gain: float
    deviation: float


def parts_of(gradient: Tensor) -> dict[str, Tensor]:
    """A weight gradient (Cout, Cin, kh, kw) as a whole, and its parts along the kernel's axes.

    A part holds the coefficients of the orthonormal polynomial of degree 0, 1 or 2 in the position:
    in a kernel of three, (1, 1, 1), (−1, 0, 1) and (1, −2, 1) up to factors. An axis of length k
    has k parts at most; one of length 1 has none, as its mean is the whole.
    """
    gradient = gradient.detach().double()
    parts = {WHOLE: gradient}
    for axis, dim in AXES.items():
        length = gradient.shape[dim]
        if length == 1:
            continue
        positions = torch.arange(length, dtype=torch.float64, device=gradient.device)
        powers = torch.linalg.vander(positions - positions.mean(), N=min(length, len(DEGREES)))
        basis = torch.linalg.qr(powers).Q
        for degree, polynomial in zip(DEGREES, basis.T, strict=False):
            parts[f"{degree} along {axis}"] = gradient.movedim(dim, -1) @ polynomial
    return parts


@dataclass
class Sums:
    """Sums over batches of a layer's part: both gradients, and ‖a − e‖², ⟨a, e⟩ and ‖e‖²."""

    found: Tensor | float = 0.0
    exact: Tensor | float = 0.0
    products: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, found: Tensor, exact: Tensor) -> None:
        """One batch."""
        self.found = self.found + found
        self.exact = self.exact + exact
        pairs = ((found - exact, found - exact), (found, exact), (exact, exact))
        self.products.append(tuple(float((a * b).sum()) for a, b in pairs))


class MeanGradient:
    """The mean of a layer's weight gradient over batches, approximate and exact."""

    def __init__(self) -> None:
        self.parts: dict[str, Sums] = {}

    def add(self, found: Tensor, exact: Tensor) -> None:
        """One batch: both gradients (Cout, Cin, kh, kw)."""
        exact_parts = parts_of(exact)
        for part, values in parts_of(found).items():
            self.parts.setdefault(part, Sums()).add(values, exact_parts[part])


def biases(layers: Iterable[MeanGradient]) -> dict[str, Bias]:
    """The bias of each part (see `PARTS`), the layers that have it taken as one vector."""
    layers = list(layers)
    found = {part: [m.parts[part] for m in layers if part in m.parts] for part in PARTS}
    return {part: _bias(sums) for part, sums in found.items() if sums}


def _bias(sums: list[Sums]) -> Bias:
    error = error_of([s.found for s in sums], [s.exact for s in sums])
    of_batches = zip(*(s.products for s in sums), strict=True)
    batches = [[sum(values) for values in zip(*layers, strict=True)] for layers in of_batches]
    count, exact = len(batches), sum(float(s.exact.square().sum()) for s in sums)
    mean_difference = sum(float((s.found - s.exact).square().sum()) for s in sums) / count
    passed, whole = sum(b[1] for b in batches), sum(b[2] for b in batches)
    gain = passed / whole if whole else math.nan
    chance = deviation = math.nan
    if count > 1 and exact:
        scattered = sum(b[0] for b in batches) - mean_difference
        chance = math.sqrt(max(scattered, 0.0) * count / (count - 1) / exact)
        residuals = sum((b[1] - gain * b[2]) ** 2 for b in batches)
        deviation = math.sqrt(residuals * count / (count - 1)) / whole
    return Bias(error.relative, chance, error.cosine, gain, deviation)
