"""Dense weight gradients of convolutions with a large stride: three programs, one result.

The library's kernel is the default and the only one off the CPU. On a CPU, in float32, oneDNN's
kernel loses efficiency with the horizontal stride and on small maps, so there the image is
transposed (the stride becomes vertical) or the gradient is one matrix product.
`tools/benchmark.py` shows what each shape gains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import Geometry, gradients

SMALL_MAP = 32  # output positions
MANY_CHANNELS = 256  # below, gathering the windows costs more than the product


def program(grad_output: Tensor, kernel: tuple[int, int], geometry: Geometry) -> str:
    """Which program `strided_grad_weight` runs: "strided", "transposed" or "matmul"."""
    on_cpu = grad_output.device.type == "cpu" and grad_output.dtype == torch.float32
    if not on_cpu or geometry.groups > 1 or kernel == (1, 1):
        return "strided"
    positions = grad_output.shape[2] * grad_output.shape[3]
    if positions <= SMALL_MAP and grad_output.shape[1] >= MANY_CHANNELS:
        return "matmul"
    if geometry.stride[1] == 2 and kernel[1] > 1:
        return "transposed"
    return "strided"


def strided_grad_weight(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry
) -> Tensor:
    """dW (Cout, Cin/groups, kh, kw) of a dense convolution; of ``weight`` only the shape counts."""
    kernel = (weight.shape[2], weight.shape[3])
    chosen = program(grad_output, kernel, geometry)
    if chosen == "matmul":
        return _matmul(grad_output, input, kernel, geometry)
    if chosen == "transposed":
        return _transposed(grad_output, input, weight, geometry)
    return gradients(grad_output, input, weight, geometry, (False, True, False))[1]


def _transposed(grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    swapped = [
        t.transpose(2, 3).contiguous(memory_format=torch.channels_last)
        for t in (grad_output, input)
    ]
    stand_in = weight.new_empty(weight.shape[0], weight.shape[1], *weight.shape[:1:-1])
    turned = Geometry(
        geometry.stride[::-1], geometry.padding[::-1], geometry.dilation[::-1], geometry.groups
    )
    return gradients(*swapped, stand_in, turned, (False, True, False))[1].transpose(2, 3)


def _matmul(
    grad_output: Tensor, input: Tensor, kernel: tuple[int, int], geometry: Geometry
) -> Tensor:
    samples, outputs, height, width = grad_output.shape
    (pad_h, pad_w), channels = geometry.padding, input.shape[1]
    padded = F.pad(input.permute(0, 2, 3, 1), (0, 0, pad_w, pad_w, pad_h, pad_h))
    s_n, s_h, s_w, s_c = padded.stride()
    windows = padded.as_strided(
        (samples, height, width, *kernel, channels),
        (
            s_n,
            s_h * geometry.stride[0],
            s_w * geometry.stride[1],
            s_h * geometry.dilation[0],
            s_w * geometry.dilation[1],
            s_c,
        ),
    )
    columns = windows.reshape(samples * height * width, kernel[0] * kernel[1] * channels)
    rows = grad_output.permute(0, 2, 3, 1).reshape(samples * height * width, outputs)
    return (rows.T @ columns).view(outputs, *kernel, channels).permute(0, 3, 1, 2)
