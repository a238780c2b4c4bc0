"""How alike neighbouring columns of features are, and what replacing them costs (FST, Figure 5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.functional import sparse_conv2d
from fst.rules.alternating import Alternating
from fst.rules.strategy import Strategy
from fst.studies.analysis.errors import error_of
from fst.studies.analysis.record import LayerRecord
from fst.studies.benchmark.layers import padded_input

MOST_PREFIX_TOKENS = 5  # a class token and four registers


class Similarity(NamedTuple):
    """The numbers of one layer in one step.

    Attributes:
        difference: mean |X − its right neighbour| over the range of X.
        reconstruction: ‖Xʳ − X‖ / ‖X‖ of im2col(X), what Eq. 9 replaces.
        restored: relative error of grad_weight with information restoration (Eq. 10).
        dropped: relative error of grad_weight without it.
    """

    difference: float
    reconstruction: float
    restored: float
    dropped: float


class Neighbours(NamedTuple):
    """Mean |difference| of neighbouring positions over that of any two positions of a map.

    1 says that neighbours are no more alike than strangers; None, that there are no neighbours.

    Attributes:
        positions: height and width, or a number of tokens.
        sequence: along the order in which a layer's positions are stored, row by row.
        rows: of left and right neighbours, within a row of the map.
        columns: of upper and lower neighbours.
    """

    positions: str
    sequence: float | None
    rows: float | None
    columns: float | None


def neighbours(features: Tensor, *, channels_last: bool = False) -> Neighbours | None:
    """The numbers of features (N, C, H, W), or with ``channels_last`` (N, T, C) or (N, H, W, C).

    The last of T tokens are a square grid of patches, if at most `MOST_PREFIX_TOKENS` are left over
    in front of it. None where positions are too few, or all values of each map are equal.
    """
    if channels_last:
        features = features.movedim(-1, 1)
    if features.dim() == 4:
        return _neighbours(features, "x".join(map(str, features.shape[2:])))
    tokens = features.shape[2]
    found, (grid, prefix) = _neighbours(features[:, :, None], str(tokens)), patch_grid(tokens)
    if found is None or not grid:
        return found
    inside = _neighbours(features[:, :, prefix:].unflatten(2, (grid, grid)), "")
    words = f"{tokens} = {f'{prefix} + ' if prefix else ''}{grid}x{grid}"
    across = (inside.rows, inside.columns) if inside else (None, None)
    return Neighbours(words, found.sequence, *across)


def patch_grid(tokens: int) -> tuple[int, int]:
    """Side of the square grid of patches among ``tokens``, 0 if there is none, and what is left."""
    side = math.isqrt(tokens)
    prefix = tokens - side**2
    return (side, prefix) if side > 1 and prefix <= MOST_PREFIX_TOKENS else (0, 0)


def _neighbours(maps: Tensor, positions: str) -> Neighbours | None:
    flat = maps.flatten(2).double()
    count = flat.shape[2]
    if count < 2:
        return None
    ordered = flat.sort(2).values
    ranks = torch.arange(1 - count, count, 2, dtype=flat.dtype, device=flat.device)
    any_two = (ordered * ranks).sum(2).mean() / (count * (count - 1) / 2)
    if not any_two:
        return None

    def ratio(values: Tensor, axis: int) -> float | None:
        if values.shape[axis] < 2:
            return None
        return float(values.double().diff(dim=axis).abs().mean() / any_two)

    return Neighbours(positions, ratio(flat, 2), ratio(maps, 3), ratio(maps, 2))


def adjacent_difference(features: Tensor) -> Tensor:
    """X − its right neighbour: (..., W) -> (..., W − 1)."""
    return features[..., :-1] - features[..., 1:]


def reconstruction(features: Tensor) -> Tensor:
    """Columns 1, 3, 5, … become copies of columns 0, 2, 4, …; same shape."""
    kept = features[..., ::2]
    return kept.repeat_interleave(2, -1)[..., : features.shape[-1]]


def layer_similarity(record: LayerRecord) -> Similarity:
    """The numbers of one recorded convolution, all its calls together.

    Raises:
        ValueError: its weight is frozen, so it has no grad_weight.
    """
    layer = record.layer
    if not layer.weight.requires_grad:
        raise ValueError("the weight is frozen: it has no grad_weight.")
    spans, differences, columns, copies = [], [], [], []
    for call in record.calls:
        differences.append(adjacent_difference(call.input).abs().double().mean())
        spans.append((call.input.amax() - call.input.amin()).double())
        matrix = _im2col(call.input, layer, call.grad_output.shape[2:])
        columns.append(matrix)
        copies.append(reconstruction(matrix))
    difference = torch.stack(differences).mean() / torch.stack(spans).amax().clamp(min=1e-30)
    error = error_of(copies, columns).relative
    del columns, copies
    exact = grad_weight(record, Strategy("dense"))
    errors = [
        error_of([grad_weight(record, Strategy("alternating", grad_weight=rule))], [exact]).relative
        for rule in (Alternating(restore=True), Alternating(restore=False))
    ]
    return Similarity(float(difference), error, *errors)


def grad_weight(record: LayerRecord, strategy: Strategy) -> Tensor:
    """The weight gradient of the recorded calls under ``strategy``, in float32 or wider."""
    layer = record.layer
    weight = layer.weight.detach().requires_grad_()
    total = torch.zeros_like(weight)
    for call in record.calls:
        input, geometry = padded_input(layer, call.input.to(weight.dtype))
        with torch.enable_grad():
            output = sparse_conv2d(input, weight, None, *geometry, strategy)
        total += torch.autograd.grad(output, weight, call.grad_output.to(weight.dtype))[0]
    return total


def _im2col(input: Tensor, layer: nn.Conv2d, output_size: torch.Size) -> Tensor:
    """(N, Cin·kh·kw, P, Q)."""
    padded, geometry = padded_input(layer, input)
    columns = F.unfold(
        padded, layer.kernel_size, geometry.dilation, geometry.padding, geometry.stride
    )
    return columns.unflatten(2, tuple(output_size))
