"""Depthwise convolutions, alone or between two of 1x1 whose zeros are skipped, by the C++ kernel.

Between the layers no maps are written to memory: some rows at a time stay in the cache of a core.
For inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.zeros_weight import ACTIVATIONS, MOST_TAPS, lists_of, product_numbers
from fst.ops.geometry import LINEAR, Geometry, empty_maps, output_shape
from fst.ops.packed import Packed, PackedWeight

LEAST_CHANNELS = 16  # the widest vector
KEPT = 448 * 1024  # bytes of rows that a thread keeps, in the second cache of a core
PIXELS = 2  # what a vector of a 1x1 product runs over


class Layer(NamedTuple):
    """A convolution with what follows it.

    Attributes:
        weight: (Cout, 1, kh, kw) of a depthwise one, (Cout, Cin, 1, 1) of a neighbour.
        bias: (Cout,) float32, or None.
        activation: an index of ACTIVATIONS.
    """

    weight: Tensor
    bias: Tensor | None
    activation: int


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """True for a convolution that the kernel knows: each channel of its own, no fewer than a vector
    has numbers.
    """
    channels, inside, *kernel = weight.shape
    return inside == 1 and groups == channels >= LEAST_CHANNELS and max(kernel) <= MOST_TAPS


def refuses_depthwise(input: Tensor, channels: int, weight: Tensor, geometry: Geometry) -> str:
    """The reason why the kernel cannot take a depthwise convolution; "" if it can.

    Args:
        input: (N, channels, H, W), of it or of the 1x1 product before it.
        channels: that the first of the layers takes.
        weight: (C, 1, kh, kw) of the depthwise one.
    """
    if reason := cpp.refuses(input, weight.detach()):
        return reason
    if not input.is_contiguous(memory_format=cpp.LAST) or not input.numel():
        return "its input is not channels_last, or empty"
    if input.shape[1] != channels or not is_depthwise(weight, geometry.groups):
        return f"{input.shape[1]} channels are none that it takes"
    try:
        cpp.convolution((input.shape[0], weight.shape[0], *input.shape[2:]), weight.shape, geometry)
    except ValueError:
        return "sizes that do not belong together, or are too large"
    return ""


class PreparedDepthwise:
    """activation(W * X + bias) of a depthwise convolution, for inputs of one size and dtype.

    X is the input, or ``before`` of it; the result goes to memory, or through ``behind``, to which
    a residual of the result's form may be added. Sums are of float32; what lies between is rounded
    to the input's dtype.
    """

    def __init__(
        self,
        input: Tensor,
        layer: Layer,
        geometry: Geometry,
        before: Layer | None = None,
        behind: Layer | None = None,
    ) -> None:
        """Count and list all that depends on the weights and on the form of the input.

        Args:
            input: (N, Cin, H, W), channels_last; only its form counts.
            geometry: of the depthwise convolution.

        Raises:
            TypeError, ValueError: layers that do not follow each other, or that the kernel does not
                take.
        """
        cpp.check_operands(input=input)
        cpp.check_plain(torch.float32, layer.weight.shape[:1], bias=layer.bias)
        images, channels, height, width = input.shape
        if before is not None:
            channels = before.weight.shape[0]
        size = (images, channels, height, width)
        numbers, _ = cpp.convolution(size, layer.weight.shape, geometry)
        shape = output_shape(size, layer.weight.shape, geometry)
        made, used = _rows(size, shape, layer.weight.shape[2], geometry, input.element_size())
        first = _Side(before, input.shape[1], made, width, input.dtype)
        last = _Side(behind, channels, used, shape[3], input.dtype)
        if behind is not None:
            shape = (images, behind.weight.shape[0], *shape[2:])
        like = empty_maps(shape, input, True)
        self._weight = layer.weight.detach().float().flatten(1).t().contiguous()
        self._bias, self._sides, self._run = layer.bias, (first, last), cpp.kernel("fst_depthwise")
        self._form = (like.shape, like.stride())
        self._fixed = (
            *(cpp.KINDS[input.dtype], cpp.integers(*numbers), channels, self._weight.data_ptr()),
            *(cpp.pointer(layer.bias), layer.activation, *first.arguments, *last.arguments),
        )

    def __call__(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result for an input of the given form."""
        result = torch.empty_strided(*self._form, dtype=input.dtype)
        given = (*self._fixed, cpp.pointer(residual), result.data_ptr())
        self._run(input.data_ptr(), *given)
        return result


class _Side:
    """Arguments of the kernel for a 1x1 product of ``rows`` rows at a time; keeps their memory."""

    def __init__(
        self, layer: Layer | None, channels: int, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        self.arguments: tuple[Any, ...] = (None, None, 0, None, 0)
        if layer is None:
            return
        weight = layer.weight
        if weight.shape[1:] != (channels, 1, 1) or weight.dtype != dtype:
            found = f"{weight.dtype} {tuple(weight.shape)}"
            raise ValueError(f"a weight {found} must be {dtype} (Cout, {channels}, 1, 1).")
        cpp.check_plain(torch.float32, weight.shape[:1], bias=layer.bias)
        numbers = product_numbers((1, channels, rows, width), weight.shape, LINEAR, False, PIXELS)
        self.lists, self.bias = lists_of(weight, numbers), layer.bias
        self.arguments = (
            *(cpp.integers(*numbers), self.lists.data_ptr(), 8 * len(self.lists)),
            *(cpp.pointer(layer.bias), layer.activation),
        )


def _rows(
    size: Sequence[int], shape: Sequence[int], kernel: int, geometry: Geometry, element: int
) -> tuple[int, int]:
    """Rows of a depthwise convolution's input that are made at once, and of its output."""
    _, channels, height, width = size
    span = (kernel - 1) * geometry.dilation[0] + 1
    made = max(KEPT // (2 * width * channels * element), span - 1, 1)
    made = min(made, height)
    return made, max(1, min(made // geometry.stride[0], shape[2]))


class Depthwise(Backend):
    """A depthwise layer, alone or with those of 1x1 around it, whose zeros are skipped."""

    name = "depthwise"
    computes = {"packed": "C++ for CPUs: a depthwise layer, with its neighbours row by row"}

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Packed) -> str:
        of, input, residual = operands.weight, operands.input, operands.residual
        weight, geometry, first = of.folded.weight, of.geometry, operands.before or of
        channels = first.folded.weight.shape[1] * first.geometry.groups
        reason = refuses_depthwise(input, channels, weight, geometry)
        if reason or residual is None:
            return reason
        if operands.behind is None:
            return "a residual is added to a depthwise layer"
        images, _, *size = output_shape(input.shape, weight.shape, geometry)
        shape = (images, len(operands.behind.folded.weight), *size)
        is_last = residual.is_contiguous(memory_format=cpp.LAST)
        fits = is_last and residual.shape == shape and residual.dtype == input.dtype
        return "" if fits else "the residual has another form than the output"

    def packed(self, operands: Packed) -> Callable[[Packed], Tensor]:
        middle, others = operands.weight, (operands.before, operands.behind)
        around = [None if of is None else _layer(of) for of in others]
        product = PreparedDepthwise(operands.input, _layer(middle), middle.geometry, *around)
        return lambda o: product(o.input, o.residual)

    packed_chain = packed


def _layer(of: PackedWeight) -> Layer:
    weight, _, bias = of.folded
    return Layer(weight.contiguous(), bias, ACTIVATIONS.index(of.activation))


register_backend(Depthwise())
