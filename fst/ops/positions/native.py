"""`fst.ops.positions.products`, computed by the C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.ops import cpp
from fst.ops.geometry import Geometry, is_channels_last
from fst.ops.positions.products import Listed


def takes_scores(scores: Tensor) -> bool:
    """Whether the kernels can draw positions by these scores."""
    on_cpu = type(scores) is Tensor and scores.device.type == "cpu"
    return on_cpu and scores.dtype == torch.float32 and not cpp.missing()


def grad_weight(
    grad_output: Tensor, input: Tensor, weight: Tensor, listed: Listed, geometry: Geometry
) -> Tensor:
    """As `products.grad_weight`."""
    index, scale, source, mean, sums = listed
    if not cpp.takes_lists(grad_output):  # sums of some positions, which lie apart
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
    if scale is None:
        scale = torch.ones(len(index))
    source = index.new_empty(0) if source is None else source
    mean = scale.new_empty(0) if mean is None else mean
    sums = scale.new_empty(0) if sums is None else sums.contiguous()
    operands = (grad_output, input, index, scale, source, mean, sums)
    return cpp.list_grad_weight(*operands, weight.shape, *geometry, is_channels_last(weight))


def grad_input(
    grad_output: Tensor, weight: Tensor, listed: Listed, input_shape: torch.Size, geometry: Geometry
) -> Tensor:
    """As `products.grad_input`."""
    return cpp.list_grad_input(grad_output, weight, *listed[:2], input_shape, *geometry)
