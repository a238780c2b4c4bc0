"""How alike neighbouring columns of features are, and what replacing them costs (FST, Figure 5)."""

from __future__ import annotations

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
