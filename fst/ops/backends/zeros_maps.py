"""Products of a convolution without the zeros of X or of dY, by the C++ kernels for CPUs.

The results are those of the dense products, up to the order of their sums. A zero is skipped
whatever it is multiplied by: 0 · ∞ and 0 · NaN add nothing, where a dense product adds NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fst.backends.registry import NO_GAIN, Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.library import all_kept, with_grad_input
from fst.ops.backends.lists import listed_of, share_of_positions
from fst.ops.backends.zeros_weight import are_few, cost_of
from fst.ops.geometry import Geometry, geometry_of, is_channels_last, positions_of, share_of_mean
from fst.ops.operands import (
    DrawnGradWeight,
    FixedGradWeight,
    Gradients,
    GradInput,
    GradWeight,
    Output,
)
from fst.ops.positions import draw

MOST_TAPS = 31  # of a kernel along an axis
LEAST_CHANNELS = 4  # of a group
Numbers = tuple[ctypes.Array, int, int, int]  # of a convolution; channels of a group, and groups


def refuses_maps(operands: Sequence[Tensor], weight_shape: Sequence[int], groups: int) -> str:
    """The reason why these kernels cannot take a product of a convolution; "" if they can.

    Args:
        operands: the two tensors (N, C, H, W) that are multiplied.
        weight_shape: (Cout, Cin/groups, kh, kw).
    """
    if reason := cpp.refuses(*operands):
        return reason
    if min(weight_shape[0] // groups, weight_shape[1]) < LEAST_CHANNELS:
        return f"groups of fewer than {LEAST_CHANNELS} channels"
    return _too_large(max(x.numel() // max(x.shape[1], 1) for x in operands), weight_shape)


def _too_large(places: int, weight_shape: Sequence[int]) -> str:
    """The limit of the kernels that so many pixels or a weight exceed; "" if none is exceeded."""
    if max(weight_shape[2:]) > MOST_TAPS:
        return f"a kernel of more than {MOST_TAPS} taps along an axis"
    if max(places, math.prod(weight_shape)) > cpp.MOST_POSITIONS:
        return f"more than {cpp.MOST_POSITIONS} places or weights"
    return ""


@cpp.operator(like=cpp.like_output, tensors=3)
def maps_output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[..., Tensor]:
    """Y = W·X + bias without the zeros of X.

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw).
        bias: (Cout,) in the dtype of the input.

    Returns:
        (N, Cout, P, Q) in the dtype and memory format of the input.
    """
    cpp.check_operands(input=input, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input.shape, weight.shape, geometry)
    cpp.check_plain(input.dtype, (len(weight),), bias=bias)
    like = cpp.like_output(input, weight, *geometry)
    return _product(input, weight, False, like, numbers)


@cpp.operator(like=cpp.like_grad_input, tensors=2)
def maps_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[..., Tensor]:
    """dX = Wᵀ·dY without the zeros of dY.

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw).
        input_size: (N, Cin, H, W).

    Returns:
        dX of ``input_size``, in the dtype and memory format of grad_output.
    """
    cpp.check_operands(grad_output=grad_output, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input_size, weight.shape, geometry)
    cpp.check_map(grad_output, input_size, weight.shape, geometry)
    like = cpp.like_grad_input(grad_output, input_size)
    return _product(grad_output, weight, True, like, numbers)


@cpp.operator(like=cpp.like_grad_weight, tensors=6)
def maps_grad_weight(
    grad_output: Tensor,
    input: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    sums: Tensor | None,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
    zeros_of: str,
) -> Callable[..., Tensor]:
    """dW = dY·Xᵀ without the zeros of X or of dY; over a list of output positions, if one is given:
    Σ_j weight_j · dY[index_j] · (X − mean)[window j]ᵀ, and sums · meanᵀ for each tap.

    Args:
        grad_output: (N, Cout, P, Q).
        input: (N, Cin, H, W).
        index: (n,) int32, positions of the output map, ascending; None: all of them.
        weight: (n,) float32; None: 1 everywhere. Positions whose weights add up to 0 are skipped.
        mean: (Cin,) float32, with a list: subtracted from the input inside the image.
        sums: (Cout, kh, kw) float32, which ``mean`` is multiplied by; None: nothing is added.
        weight_shape: (Cout, Cin/groups, kh, kw).
        channels_last: the memory format of the result.
        zeros_of: "input" or "grad_output", whose zeros are skipped.

    Returns:
        dW of ``weight_shape``, in the dtype of grad_output.
    """
    cpp.check_operands(grad_output=grad_output, input=input)
    if zeros_of not in ("input", "grad_output"):
        raise ValueError(f"zeros_of={zeros_of!r} must be 'input' or 'grad_output'.")
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = _numbers(input.shape, weight_shape, geometry)
    cpp.check_map(grad_output, input.shape, weight_shape, geometry)
    if index is None and not (weight is mean is sums is None):
        raise ValueError("weight, mean and sums belong to a list: index must be given.")
    if index is not None:
        cpp.check_list(index, weight, positions_of(grad_output))
    cpp.check_plain(torch.float32, (input.shape[1],), mean=mean)
    cpp.check_plain(torch.float32, (weight_shape[0], *weight_shape[2:]), sums=sums)
    like = cpp.like_grad_weight(grad_output, weight_shape, channels_last)
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(like))
    run, last = cpp.kernel("fst_maps_grad_weight"), (*numbers, cpp.integers(*layouts))
    first = cpp.KINDS[input.dtype], zeros_of == "input"
    shape, strides = like.shape, like.stride()
    is_empty = not grad_output.numel() or not like.numel()

    def multiply(
        grad_output: Tensor,
        input: Tensor,
        index: Tensor | None = None,
        weight: Tensor | None = None,
        mean: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if is_empty or (index is not None and not index.numel()):
            if mean is None or sums is None:
                return result.zero_()
            return result.copy_(share_of_mean(sums, mean, groups))
        if index is not None and weight is None:
            weight = torch.ones(len(index), dtype=torch.float32)
        run(
            *(grad_output.data_ptr(), input.data_ptr(), *first),
            None if index is None else index.data_ptr(),
            None if weight is None else weight.data_ptr(),
            0 if index is None else index.numel(),
            None if mean is None else mean.data_ptr(),
            None if sums is None else sums.data_ptr(),
            *(*last, result.data_ptr()),
        )
        return result

    return multiply


def _product(
    source: Tensor, weight: Tensor, backward: bool, like: Tensor, numbers: Numbers
) -> Callable[..., Tensor]:
    """A product of ``source`` and ``weight``, of the form of ``like``; only forms count."""
    layouts = (is_channels_last(source), is_channels_last(weight), is_channels_last(like))
    run, last = cpp.kernel("fst_maps_product"), (*numbers, cpp.integers(*layouts))
    kind, shape, strides = cpp.KINDS[source.dtype], like.shape, like.stride()
    is_empty, is_all_bias = not like.numel(), not source.numel()

    def multiply(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=source.dtype)
        if is_empty:
            return result
        if is_all_bias:
            return result.zero_() if bias is None else result.copy_(bias.view(1, -1, 1, 1))
        run(
            *(source.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(kind, backward, *last, result.data_ptr()),
        )
        return result

    return multiply


def _numbers(input_size: Sequence[int], weight_shape: Sequence[int], geometry: Geometry) -> Numbers:
    """Return the numbers that kernels take of shapes, see `convolution`."""
    numbers, channels = cpp.convolution(input_size, weight_shape, geometry)
    samples, height, width, *_ = numbers
    if reason := _too_large(samples * height * width, weight_shape):
        raise ValueError(f"input {tuple(input_size)} and weight {tuple(weight_shape)}: {reason}.")
    return cpp.integers(*numbers), *channels


Product = Output | GradInput | GradWeight


class ZerosOfMaps(Backend):
    """Each pixel's channels that are not zero are listed; vectors run over the other channels.

    Attributes:
        operand: whose zeros are skipped.
    """

    operand: ClassVar[str] = "input"

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Product) -> str:
        weight = operands.weight
        if isinstance(operands, GradWeight):
            maps = (operands.grad_output, operands.input)
        elif isinstance(operands, GradInput):
            maps = (operands.grad_output, weight)
        else:
            maps = (operands.input, weight)
        reason = refuses_maps(maps, weight.shape, operands.geometry.groups)
        few = are_few(self._share(operands))
        return reason or (f"{NO_GAIN}few of its numbers are zero" if few else "")

    def cost(self, operands: Product) -> float:
        speed = 0.8 if operands.operation == "grad_weight" else 0.6
        return cost_of(operands, speed, self._share(operands))

    def _share(self, operands: Product) -> float:
        share: float = getattr(operands.zeros, self.operand)
        return share

    def _wanted(self, operands: GradWeight) -> tuple[object, ...]:
        weight = operands.weight
        return weight.shape, *operands.geometry, is_channels_last(weight), self.operand


class ZerosAnywhere(ZerosOfMaps):
    """Products over all positions, which a rule may draw from."""

    def grad_weight(self, operands: GradWeight) -> Callable[[GradWeight], Gradients]:
        maps, no_list = (operands.grad_output, operands.input), (None, None, None, None)
        multiply = maps_grad_weight.plan(*maps, *no_list, *self._wanted(operands))
        return with_grad_input(operands, lambda o: multiply(o.grad_output, o.input, *no_list))

    drawn_grad_weight = grad_weight


class ZerosOfInput(ZerosAnywhere):
    """Zeros that ReLU has made in the layer's input."""

    name = "zeros_input"
    computes = {
        "output": "C++ for CPUs: zeros of the input are skipped",
        "grad_weight": "C++ for CPUs: zeros of the input are skipped",
    }

    def refuses(self, operands: Product) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, Output) and operands.zeros.weight >= 0.5:
            return f"{NO_GAIN}half of the weight is zero, and its kernel is the faster one"
        return ""

    def skipped(self, operands: Product) -> str:
        return f"zeros of X, {operands.zeros.input:.0%}"

    def output(self, operands: Output) -> Callable[[Output], Tensor]:
        bias = _contiguous(operands.bias)
        multiply = maps_output.plan(operands.input, operands.weight, bias, *operands.geometry)
        if bias is None:
            return lambda o: multiply(o.input, o.weight, None)
        return lambda o: multiply(o.input, o.weight, _contiguous(o.bias))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


class ZerosOfGradOutput(ZerosAnywhere):
    """Zeros of a pruned grad_output, or of one that has come through ReLU or max pooling."""

    name = "zeros_grad_output"
    operand = "grad_output"
    computes = {
        "grad_input": "C++ for CPUs: zeros of grad_output are skipped",
        "grad_weight": "C++ for CPUs: zeros of grad_output are skipped",
    }

    def skipped(self, operands: Product) -> str:
        return f"zeros of dY, {operands.zeros.grad_output:.0%}"

    def grad_input(self, operands: GradInput) -> Callable[[GradInput], Tensor]:
        given = (operands.grad_output, operands.weight, operands.input_shape, *operands.geometry)
        multiply = maps_grad_input.plan(*given)
        return lambda o: multiply(o.grad_output, o.weight)

    drawn_grad_input = grad_input


class ListedZeros(ZerosOfMaps):
    """dW over listed positions, drawn or fixed, without the zeros of the input there."""

    name = "listed_zeros"
    computes = {"grad_weight": "C++ for CPUs: zeros of the input at listed positions are skipped"}

    def refuses(self, operands: Product) -> str:
        return super().refuses(operands) or all_kept(operands)

    def cost(self, operands: Product) -> float:
        return 1e3 * super().cost(operands)  # only a measurement may choose it

    def skipped(self, operands: Product) -> str:
        return f"{share_of_positions(operands)}, {operands.zeros.input:.0%} zeros of X"

    def drawn_grad_weight(self, operands: DrawnGradWeight) -> Callable[[GradWeight], Gradients]:
        maps, listed = (operands.grad_output, operands.input), listed_of(operands)
        multiply = maps_grad_weight.plan(*maps, *listed[:4], *self._wanted(operands))
        return with_grad_input(
            operands,
            lambda o: multiply(o.grad_output, o.input, *listed_of(o)[:4]),  # type: ignore[arg-type]
        )

    def fixed_grad_weight(
        self, operands: FixedGradWeight
    ) -> Callable[[FixedGradWeight], Gradients]:
        sums, index = _fixed(operands)
        fixed = (index, None, None, None)
        multiply = maps_grad_weight.plan(sums, operands.input, *fixed, *self._wanted(operands))

        def product(operands: FixedGradWeight) -> Gradients:
            sums, index = _fixed(operands)
            return None, multiply(sums, operands.input, index, None, None, None), None

        return product


def _fixed(operands: FixedGradWeight) -> tuple[Tensor, Tensor]:
    """A map that holds the rule's sums of grad_output at its kept positions, and their list."""
    grad_output, lattices = operands.grad_output, operands.lattices
    size = (grad_output.shape[2], grad_output.shape[3])
    sums, places = torch.zeros_like(grad_output), []
    summed = operands.rule.summed(grad_output, lattices, operands.phase)
    for part, lattice in zip(summed, lattices, strict=True):
        lattice.of(sums).copy_(part)
        places.append(draw.fixed(lattice, len(grad_output), size, grad_output.device).places)
    return sums, places[0] if len(places) == 1 else torch.cat(places).sort().values


register_backend(ZerosOfInput())
register_backend(ListedZeros())
register_backend(ZerosOfGradOutput())
