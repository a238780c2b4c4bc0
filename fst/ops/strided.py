"""Dense weight gradients of convolutions with a large stride: three programs, one result.

The library's kernel is the default, and on other devices than CPUs until something else is
measured there. On a CPU, in float32, oneDNN's kernel loses efficiency when a stride of 1 becomes a
horizontal stride of 2; there the image is transposed first, so that the stride is vertical. It also
loses efficiency on small maps with many channels, where one matrix product with the columns that
are needed is faster. `tools/benchmark.py` shows what each shape gains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fst.ops.geometry import Geometry, gradients

MANY_OUTPUTS = 256  # channels from which on the matrix product is the default
MOST_COLUMNS = 2**22  # elements of the columns that exist at a time, 16 MiB in float32


def program(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> str:
    """Which program is the default: "strided", "transposed" or "gemm"."""
    kernel = (weight.shape[2], weight.shape[3])
    on_cpu = grad_output.device.type == "cpu" and grad_output.dtype == torch.float32
    if not on_cpu or geometry.groups > 1 or kernel == (1, 1):
        return "strided"
    if weight.shape[0] >= MANY_OUTPUTS:
        return "gemm"
    return "transposed" if geometry.stride[1] == 2 and kernel[1] > 1 else "strided"


def programs(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> tuple[str, ...]:
    """The programs that can compute dW from a folded ``grad_output``, the default first.

    ``geometry`` is that of the strided gradient.
    """
    default = program(grad_output, weight, geometry)
    if weight.shape[2:] == (1, 1):
        return (default,)
    others = (name for name in PROGRAMS if name != default)
    return (default, *(n for n in others if n != "gemm" or geometry.groups == 1))


def _strided(grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
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
    return _strided(*swapped, stand_in, turned).transpose(2, 3)


def _gemm(grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """One matrix product with the columns that the positions see, a few samples at a time."""
    (rows, columns), (top, left), (row_gap, column_gap), _ = geometry
    outputs, channels, height, width = weight.shape
    batch, _, size, length = grad_output.shape
    image = input.permute(0, 2, 3, 1)
    if top or left or not image.is_contiguous():
        shape = (batch, image.shape[1] + 2 * top, image.shape[2] + 2 * left, channels)
        padded = input.new_zeros(shape)
        padded[:, top : top + image.shape[1], left : left + image.shape[2]] = image
        image = padded
    sample, line, pixel, _ = image.stride()
    steps = (sample, rows * line, columns * pixel, row_gap * line, column_gap * pixel, 1)
    patches = image.as_strided((batch, size, length, height, width, channels), steps)
    grads = grad_output.permute(0, 2, 3, 1)
    chunk = max(1, MOST_COLUMNS // max(1, patches.shape[1:].numel()))
    total = grad_output.new_zeros(outputs, height * width * channels)
    for start in range(0, batch, chunk):
        part = patches[start : start + chunk].reshape(-1, height * width * channels)
        total.addmm_(grads[start : start + chunk].reshape(-1, outputs).t(), part)
    return total.view(outputs, height, width, channels).permute(0, 3, 1, 2)


PROGRAMS = {"strided": _strided, "transposed": _transposed, "gemm": _gemm}
