"""Y and dX of a convolution that leave out the zeros of the weight, by the C++ kernels.

The products are those of the dense kernels up to the order of their sums. A zero of the weight is
not multiplied, so 0 · inf adds nothing; NaN and infinities of the weight are numbers like others,
and dX of such a weight is the dense product.

``lanes`` says what a vector of the processor runs over: 0 a rule decides, 1 images of the batch,
2 pixels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fst.ops.cpp.library import (
    KINDS,
    LAST,
    call,
    check_dense,
    check_dtypes,
    check_map,
    check_plain,
    convolution,
    integers,
    kernel,
    missing,
    operator,
    pointer,
    refuses_operands,
)
from fst.ops.geometry import (
    Geometry,
    empty_maps,
    geometry_of,
    input_gradient,
    is_channels_last,
    output_shape,
)

ACTIVATIONS = ("", "relu", "relu6", "silu", "hardswish")  # as kernels/activation.h numbers them
LEAST_CHANNELS = 4  # of a group, where there are groups
MOST_TAPS = 16  # of a kernel's side, and the most of a stride
FAR = 8  # a dilation at which a tile's window may be too large for the kernel's offsets


def refuses_zeros(
    maps: Tensor, weight: Tensor, geometry: Geometry, input_size: Sequence[int] | None = None
) -> str:
    """Why the kernels cannot take a product, in words; "" if they can.

    Args:
        maps: the input (N, Cin, H, W) of Y, or grad_output (N, Cout, P, Q) of dX.
        weight: (Cout, Cin/groups, kh, kw).
        input_size: (N, Cin, H, W) of dX; None for Y.
    """
    if reason := missing() or refuses_operands(maps, weight.detach()):
        return reason
    if not maps.numel() or not weight.numel():
        return "an operand has no elements"
    inside, out = weight.shape[1], weight.shape[0] // geometry.groups
    if geometry.groups > 1 and min(inside, out) < LEAST_CHANNELS:
        return f"groups of fewer than {LEAST_CHANNELS} channels"
    if max(*weight.shape[2:], *geometry.stride) > MOST_TAPS:
        return f"a kernel or stride of more than {MOST_TAPS}"
    if torch.compiler.is_compiling():  # no call of the library can be traced here
        return "" if _surely_fits(weight.shape, geometry) else "a window that may be too large"
    backward = input_size is not None
    size = maps.shape if input_size is None else input_size
    try:
        _list_size(product_numbers(size, weight.shape, geometry, backward))
    except ValueError:
        return "sizes that do not belong together, or are too large"
    return ""


def _surely_fits(weight_shape: Sequence[int], geometry: Geometry) -> bool:
    """True if the window of any tile that kernels/sparse_weight.h cuts, of at most 28 vectors of 16
    numbers, is small enough for its offsets and for what a thread packs.
    """
    _, inside, high, wide = weight_shape
    rows, columns = min(geometry.stride[0], high), min(geometry.stride[1], wide)
    down, across = geometry.dilation[0] * (high - 1), geometry.dilation[1] * (wide - 1)
    of_images = max((3 + down) * (28 * columns + across), (12 + down) * (7 * columns + across))
    of_pixels = max((1 + down) * 28 * wide, (28 + down) * wide)
    of_channel = 16 * rows * max(of_images, of_pixels)
    channels = max(inside * geometry.groups, weight_shape[0])
    near = max(geometry.dilation) <= FAR and of_channel <= 2**17
    return near and channels * of_channel <= 2**26


def _like_output(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    geometry = geometry_of(stride, padding, dilation, groups)
    shape = output_shape(input.shape, weight.shape, geometry)
    return empty_maps(shape, input, is_channels_last(input))


@operator(like=_like_output, tensors=4)
def zeros_output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: int = 0,
    lanes: int = 0,
) -> Callable[..., Tensor]:
    """Y = activation(W * X + bias + residual), with one rounding.

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw), of the input's dtype.
        bias: (Cout,) float32.
        residual: (N, Cout, P, Q), of the dtype and memory format of the result.
        activation: an index of ACTIVATIONS.

    Returns:
        (N, Cout, P, Q), in the dtype and memory format of the input.

    Raises:
        TypeError, ValueError: operands or numbers that the kernels do not take.
    """
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = product_numbers(input.shape, weight.shape, geometry, False, lanes)
    check_dtypes(input=input, weight=weight)
    return _product(input, weight, numbers, _like_output(input, weight, *geometry), activation)


class PreparedOutput:
    """`zeros_output` of one weight, for inputs of one size, layout and dtype.

    All but the addresses of the operands is checked and counted once, so a call costs little beside
    a small product.

    Attributes:
        lists: of `zeros_lists`.
        like: the result's form, without numbers.
    """

    def __init__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, lanes: int
    ) -> None:
        """Arguments as those of `zeros_output`; only the form of the input counts."""
        numbers = product_numbers(input.shape, weight.shape, geometry, False, lanes)
        check_dtypes(input=input, weight=weight)
        check_dense("input", input, "(N, C, H, W)")
        like = _like_output(input, weight, *geometry)
        self.lists, self.like = lists_of(weight, numbers), like.to("meta")
        self._bias = None if bias is None else bias.contiguous()
        self._form = (like.shape, like.stride())
        self._fixed = _fixed(input, self.lists, numbers, like, self._bias)

    def __call__(self, input: Tensor, residual: Tensor | None, activation: int) -> Tensor:
        """Y of an input of the form that this was made for, and a residual of the form of Y."""
        result = torch.empty_strided(*self._form, dtype=input.dtype)
        given = (*self._fixed, pointer(residual), activation, result.data_ptr())
        call("fst_zeros_product", input.data_ptr(), *given)
        return result


@operator(like=_like_output, tensors=5)
def kept_output(
    input: Tensor,
    weight: Tensor,
    lists: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: int = 0,
    lanes: int = 0,
) -> Callable[..., Tensor]:
    """`zeros_output`, by ``lists`` of its weight where they serve the input's size.

    For exported programs, which take other sizes than that of their example.
    """
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = product_numbers(input.shape, weight.shape, geometry, False, lanes)
    like = _like_output(input, weight, *geometry)

    def multiply(
        input: Tensor,
        weight: Tensor,
        lists: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        rest = (numbers, like, bias, residual, activation)
        if lists is not None:
            try:
                return _multiply(input, lists, *rest)
            except ValueError:  # of another size, or made on another kind of processor
                pass
        return _multiply(input, lists_of(weight, numbers), *rest)

    return multiply


def _like_grad_input(grad_output: Tensor, input_size: Sequence[int]) -> Tensor:
    return empty_maps(input_size, grad_output, is_channels_last(grad_output))


@operator(like=_like_grad_input, tensors=2)
def zeros_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    lanes: int = 0,
) -> Callable[..., Tensor]:
    """dX = Wᵀ * dY.

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw), of the dtype of grad_output.
        input_size: (N, Cin, H, W).

    Returns:
        dX of ``input_size``, in the dtype and memory format of grad_output.

    Raises:
        TypeError, ValueError: operands or numbers that the kernels do not take.
    """
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers = product_numbers(input_size, weight.shape, geometry, True, lanes)
    check_dtypes(grad_output=grad_output, weight=weight)
    check_map(grad_output, input_size, weight.shape, geometry)
    like = _like_grad_input(grad_output, input_size)
    product = _product(grad_output, weight, numbers, like)
    dense = input_gradient(grad_output, weight, geometry, like.shape)

    def multiply(grad_output: Tensor, weight: Tensor) -> Tensor:
        try:
            return product(grad_output, weight)
        except FloatingPointError:  # 0 · inf where a tap meets no output
            result = _like_grad_input(grad_output, like.shape)
            return result.copy_(dense(grad_output, weight))

    return multiply


def product_numbers(
    input_size: Sequence[int],
    weight_shape: Sequence[int],
    geometry: Geometry,
    grad_input: bool,
    lanes: int = 0,
) -> tuple[int, ...]:
    """Numbers of a product as kernels/sparse_weight.h takes them, see `convolution`."""
    numbers, channels = convolution(input_size, weight_shape, geometry)
    return (*numbers, *channels, int(grad_input), lanes)


def _list_size(numbers: tuple[int, ...]) -> int:
    size = ctypes.c_int64()
    call("fst_zeros_lists_size", integers(*numbers), ctypes.addressof(size))
    return size.value


def lists_of(weight: Tensor, numbers: tuple[int, ...]) -> Tensor:
    """`zeros_lists` for `product_numbers`."""
    check_dtypes(weight=weight)
    check_dense("weight", weight, "(Cout, Cin/groups, kh, kw)")
    size = _list_size(numbers)
    lists = torch.empty(size // 8, dtype=torch.int64)
    call(
        "fst_zeros_lists",
        *(weight.data_ptr(), KINDS[weight.dtype], is_channels_last(weight), integers(*numbers)),
        *(lists.data_ptr(), size),
    )
    return lists


def _product(
    maps: Tensor, weight: Tensor, numbers: tuple[int, ...], like: Tensor, activation: int = 0
) -> Callable[..., Tensor]:
    """The product of maps and a weight whose lists are made in each call; only forms count.

    Returns:
        a function of maps, weight, bias and residual.
    """
    check_dense("maps", maps, "(N, C, H, W)")
    check_dense("weight", weight, "(Cout, Cin/groups, kh, kw)")
    run, make = kernel("fst_zeros_product"), kernel("fst_zeros_lists")
    size, given = _list_size(numbers), integers(*numbers)
    kind, last = KINDS[maps.dtype], is_channels_last(weight)
    layouts = integers(
        maps.is_contiguous(memory_format=LAST), like.is_contiguous(memory_format=LAST)
    )
    shape, strides, dtype = like.shape, like.stride(), maps.dtype

    def multiply(
        maps: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=dtype)
        if bias is not None or residual is not None:
            _check_added(result, bias, residual)
        lists = torch.empty(size, dtype=torch.uint8)
        place = lists.data_ptr()
        make(weight.data_ptr(), kind, last, given, place, size)
        run(
            *(maps.data_ptr(), kind, layouts, given, place, size),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            *(activation, result.data_ptr()),
        )
        return result

    return multiply


def _check_added(result: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    check_plain(torch.float32, (result.shape[1],), bias=bias)
    if residual is not None and (
        residual.dtype != result.dtype
        or residual.shape != result.shape
        or residual.stride() != result.stride()
    ):
        raise ValueError(
            f"residual {residual.dtype} {tuple(residual.shape)} with strides {residual.stride()} "
            f"must be {result.dtype} {tuple(result.shape)} with {result.stride()}."
        )


def _multiply(
    maps: Tensor,
    lists: Tensor,
    numbers: tuple[int, ...],
    like: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
) -> Tensor:
    check_dtypes(maps=maps)
    check_dense("maps", maps, "(N, C, H, W)")
    if lists.dtype != torch.int64 or lists.dim() != 1 or not lists.is_contiguous():
        raise ValueError(f"lists {lists.dtype} {tuple(lists.shape)} must come from lists_of.")
    result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    bias = None if bias is None else bias.contiguous()
    _check_added(result, bias, residual)
    fixed = _fixed(maps, lists, numbers, result, bias)
    given = (*fixed, pointer(residual), activation, result.data_ptr())
    call("fst_zeros_product", maps.data_ptr(), *given)
    return result


def _fixed(
    maps: Tensor, lists: Tensor, numbers: tuple[int, ...], result: Tensor, bias: Tensor | None
) -> tuple[Any, ...]:
    """The kernel's arguments between maps and residual: the same for maps of one form."""
    layouts = (maps.is_contiguous(memory_format=LAST), result.is_contiguous(memory_format=LAST))
    return (
        *(KINDS[maps.dtype], integers(*layouts), integers(*numbers)),
        *(lists.data_ptr(), 8 * len(lists), pointer(bias)),
    )
