"""Dense weight gradients of convolutions with a large stride: two programs, one result.

The library's kernel is the default and the only one off the CPU. On a CPU, in float32, oneDNN's
kernel loses efficiency when a stride of 1 becomes a horizontal stride of 2; there the image is
transposed first, so that the stride is vertical. `tools/benchmark.py` shows what each shape gains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fst.ops.geometry import Geometry, gradients


def program(grad_output: Tensor, kernel: tuple[int, int], geometry: Geometry) -> str:
    """Which program is the default: "strided" or "transposed"."""
    on_cpu = grad_output.device.type == "cpu" and grad_output.dtype == torch.float32
    if not on_cpu or geometry.groups > 1 or kernel == (1, 1):
        return "strided"
    return "transposed" if geometry.stride[1] == 2 and kernel[1] > 1 else "strided"


def programs(grad_output: Tensor, kernel: tuple[int, int], geometry: Geometry) -> tuple[str, ...]:
    """The programs that can compute dW from a folded ``grad_output``, the default first."""
    default = program(grad_output, kernel, geometry)
    return (default, *(name for name in PROGRAMS if name != default and kernel != (1, 1)))


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


PROGRAMS = {"strided": _strided, "transposed": _transposed}
