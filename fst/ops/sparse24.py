"""The 2:4 tensor-core kernels as torch operators (``torch.ops.fst``)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import sources
from fst.basics.errors import UsageError
from fst.ops import operators
from fst.ops.geometry import Geometry, empty_maps

BACKEND = "mma_sp"
DTYPES = (torch.float16, torch.bfloat16)


class PackedWeight(NamedTuple):
    """A weight for the kernels, see `kernels/sparse24/layout.py`: S(W), and S(Wᵀ) for grad_input.

    Attributes:
        values, values_transposed: float16 or bfloat16.
        metadata, metadata_transposed: int32.
    """

    values: Tensor
    metadata: Tensor
    values_transposed: Tensor
    metadata_transposed: Tensor


def _kernels() -> ModuleType:
    return sources.load("sparse24")


def _extension() -> Any:
    reason = sources.cuda_missing()
    if reason:
        raise UsageError(f"the 2:4 kernels cannot run here: {reason}.")
    return sources.load("sparse24.extension").extension()


def _empty(weights: Sequence[Tensor], groups: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    results = []
    for weight, group in zip(weights, groups, strict=True):
        for transposed in (False, True):
            shapes = _kernels().layout.packed_shapes(weight.shape, group, transposed=transposed)
            values, metadata = shapes
            results.append(weight.new_empty(values, dtype=dtype))
            results.append(weight.new_empty(metadata, dtype=torch.int32))
    return results


def _pack(weights: Sequence[Tensor], groups: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    results = _empty(weights, groups, dtype)
    kinds = [results[i :: len(PackedWeight._fields)] for i in range(len(PackedWeight._fields))]
    _extension().pack(list(weights), list(groups), *kinds)
    return results


_PACK = operators.register("pack_sparse24", _pack, _empty)


def pack(
    weights: Sequence[Tensor], groups: Sequence[int], dtype: torch.dtype
) -> list[PackedWeight]:
    """Select and pack S(W) and S(Wᵀ) of dense weights (Cout, Cin/groups, kh, kw), in one launch for
    every 44 of them.
    """
    flat = _PACK(weights, groups, dtype)
    size = len(PackedWeight._fields)
    return [PackedWeight(*flat[i : i + size]) for i in range(0, len(flat), size)]


def _result(x: Tensor, shape: Sequence[int], transposed: bool) -> Tensor:
    samples, inputs, outputs, height, width, rows, columns, *_ = shape
    size = (samples, inputs, height, width) if transposed else (samples, outputs, rows, columns)
    return empty_maps(size, x, True)


def _convolve(
    x: Tensor,
    values: Tensor,
    metadata: Tensor,
    bias: Tensor | None,
    shape: Sequence[int],
    transposed: bool,
) -> Tensor:
    """Raises where the kernels would read what is not there, or as something else."""
    sizes = _shape(shape)
    weight = (sizes.out_channels, sizes.in_channels // sizes.groups, *sizes.kernel)
    packed = _kernels().layout.packed_shapes(weight, sizes.groups, transposed=transposed)
    read, written = sizes.in_channels, sizes.out_channels
    image, channels = (sizes.samples, read, *sizes.input), (written,)
    if transposed:
        image, channels = (sizes.samples, written, *sizes.output), (read,)
    _check("x", x, image, x.dtype, x.device)
    for name, tensor, size, dtype in (
        ("values", values, packed[0], x.dtype),
        ("metadata", metadata, packed[1], torch.int32),
        ("bias", bias, channels, x.dtype),
    ):
        if tensor is None:
            continue
        _check(name, tensor, size, dtype, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()} must be contiguous.")
    y = _result(x, shape, transposed)
    numbers = _kernels().plan.numbers(sizes, transposed=transposed)
    if y.numel():
        x = x.contiguous(memory_format=torch.channels_last)
        _extension().convolve(y, x, values, metadata, bias, numbers)
    return y


def _check(
    name: str, tensor: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (tuple(size), dtype, device):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; "
            f"it must have shape {tuple(size)}, {dtype}, on {device}."
        )


_CONVOLVE = operators.register("convolve_sparse24", _convolve, _result)


def _shape(flat: Sequence[int]) -> Any:
    head, pairs = flat[:3], [tuple(flat[i : i + 2]) for i in range(3, 15, 2)]
    return _kernels().plan.Shape(*head, *pairs, flat[15])


def _flat(
    input_shape: Sequence[int], output_shape: Sequence[int], kernel: Sequence[int], g: Geometry
) -> list[int]:
    sides = (input_shape[2:], output_shape[2:], kernel, g.stride, g.padding, g.dilation)
    return [
        *(input_shape[0], input_shape[1], output_shape[1]),
        *(side for pair in sides for side in pair),
        g.groups,
    ]


def unsupported(
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    kernel: Sequence[int],
    geometry: Geometry,
) -> str:
    """Why a convolution of these sizes cannot be computed by the kernels; "" if it can."""
    return _kernels().plan.unsupported(_shape(_flat(input_shape, output_shape, kernel, geometry)))


def convolve(
    input: Tensor,
    packed: Sequence[Tensor],
    bias: Tensor | None,
    output_shape: Sequence[int],
    kernel: Sequence[int],
    geometry: Geometry,
) -> Tensor:
    """The output GEMM (N, Cout, P, Q) of input (N, Cin, H, W), in channels_last.

    ``packed``: values and metadata of S(W).
    """
    shape = _flat(input.shape, output_shape, kernel, geometry)
    return _CONVOLVE(input, *packed, bias, shape, False)


def input_gradient(
    grad_output: Tensor,
    packed: Sequence[Tensor],
    input_shape: Sequence[int],
    kernel: Sequence[int],
    geometry: Geometry,
) -> Tensor:
    """grad_input (N, Cin, H, W) of grad_output (N, Cout, P, Q), in channels_last.

    ``packed``: values and metadata of S(Wᵀ).
    """
    shape = _flat(input_shape, grad_output.shape, kernel, geometry)
    return _CONVOLVE(grad_output, *packed, None, shape, True)
