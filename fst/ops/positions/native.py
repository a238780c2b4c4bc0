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
    if not cpp.takes_lists(grad_output):  # sums of some positions, which lie apart
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
    wanted = (weight.shape, *geometry, is_channels_last(weight))
    return cpp.list_grad_weight(grad_output, input, *listed, *wanted)


def grad_input(
    grad_output: Tensor, weight: Tensor, listed: Listed, input_shape: torch.Size, geometry: Geometry
) -> Tensor:
    """As `products.grad_input`."""
    return cpp.list_grad_input(grad_output, weight, *listed[:2], input_shape, *geometry)
