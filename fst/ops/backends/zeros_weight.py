"""Y and dX of a convolution without the zeros of the weight, by the C++ kernels for CPUs.

The products are those of the dense kernels up to the order of their sums. A zero of the weight is
not multiplied, so 0 · inf adds nothing; NaN and infinities of the weight are numbers like others,
and dX of such a weight is the dense product.

``lanes`` says what a vector of the processor runs over: 1 images of the batch; 0 and 2 pixels of
1x1 layers, and parts of images where that fills more of the vector.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fst.backends.registry import NO_GAIN, Backend, register_backend
from fst.ops import cpp
from fst.ops.geometry import Geometry, geometry_of, input_gradient, is_channels_last
from fst.ops.operands import GradInput, GradWeight, Output

ACTIVATIONS = ("", "relu", "relu6", "silu", "hardswish")  # as kernels/activation.h numbers them
LEAST_CHANNELS = 4  # of a group, where there are groups
MOST_TAPS = 16  # of a kernel's side, and the most of a stride
FAR = 8  # a dilation at which a tile's window may be too large for the kernel's offsets


def refuses_zeros(
    maps: Tensor, weight: Tensor, geometry: Geometry, input_size: Sequence[int] | None = None
) -> str:
    """The reason why the kernels cannot take a product; "" if they can.

    Args:
        maps: the input (N, Cin, H, W) of Y, or grad_output (N, Cout, P, Q) of dX.
        weight: (Cout, Cin/groups, kh, kw).
        input_size: (N, Cin, H, W) of dX; None for Y.
    """
    if reason := cpp.refuses(maps, weight.detach()):
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
    window = max((3 + down) * (28 * columns + across), (12 + down) * (7 * columns + across))
    of_channel = 16 * rows * window
    channels = max(inside * geometry.groups, weight_shape[0])
    near = max(geometry.dilation) <= FAR and of_channel <= 2**17
    return near and channels * of_channel <= 2**26


@cpp.operator(like=cpp.like_output, tensors=5)
def zeros_output(
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
    """Y = activation(W * X + bias + residual), with one rounding.

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw), of the input's dtype.
        lists: of `lists_of` this weight, if it has been called before. They serve inputs of many
            sizes, and one kind of processor; where they do not, each call makes them.
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
    cpp.check_operands(input=input, weight=weight)
    like = cpp.like_output(input, weight, *geometry)
    cpp.check_plain(torch.float32, (like.shape[1],), bias=bias)
    form = like.dtype, like.shape, like.stride()
    if residual is not None and (residual.dtype, residual.shape, residual.stride()) != form:
        raise ValueError(
            f"residual {residual.dtype} {tuple(residual.shape)} with strides {residual.stride()} "
            f"must be {like.dtype} {tuple(like.shape)} with {like.stride()}."
        )
    form_of_lists = torch.int64, 1, True
    if lists is not None and (lists.dtype, lists.dim(), lists.is_contiguous()) != form_of_lists:
        raise ValueError(f"lists {lists.dtype} {tuple(lists.shape)} must come from lists_of.")
    return _product(input, weight, numbers, like, activation)


@cpp.operator(like=cpp.like_grad_input, tensors=2)
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
    cpp.check_operands(grad_output=grad_output, weight=weight)
    cpp.check_map(grad_output, input_size, weight.shape, geometry)
    like = cpp.like_grad_input(grad_output, input_size)
    product = _product(grad_output, weight, numbers, like)
    dense = input_gradient(grad_output, weight, geometry, like.shape)

    def multiply(grad_output: Tensor, weight: Tensor) -> Tensor:
        try:
            return product(grad_output, weight)
        except FloatingPointError:  # 0 · inf where a tap meets no output
            result = cpp.like_grad_input(grad_output, like.shape)
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
    numbers, channels = cpp.convolution(input_size, weight_shape, geometry)
    return (*numbers, *channels, int(grad_input), lanes)


def _list_size(numbers: tuple[int, ...]) -> int:
    size = ctypes.c_int64()
    cpp.kernel("fst_zeros_lists_size")(cpp.integers(*numbers), ctypes.addressof(size))
    return size.value


def lists_of(weight: Tensor, numbers: tuple[int, ...]) -> Tensor:
    """The numbers of a weight that are not zero, as the product of `product_numbers` reads them."""
    cpp.check_operands(weight=weight)
    size, last = _list_size(numbers), is_channels_last(weight)
    lists = torch.empty(size // 8, dtype=torch.int64)
    given = (cpp.KINDS[weight.dtype], last, cpp.integers(*numbers), lists.data_ptr(), size)
    cpp.kernel("fst_zeros_lists")(weight.data_ptr(), *given)
    return lists


def _product(
    maps: Tensor, weight: Tensor, numbers: tuple[int, ...], like: Tensor, activation: int = 0
) -> Callable[..., Tensor]:
    """A function of maps, weight, lists of it, bias and residual of these forms."""
    run, make = cpp.kernel("fst_zeros_product"), cpp.kernel("fst_zeros_lists")
    size = _list_size(numbers)
    kind, last, given = cpp.KINDS[maps.dtype], is_channels_last(weight), cpp.integers(*numbers)
    layouts = cpp.integers(*(x.is_contiguous(memory_format=cpp.LAST) for x in (maps, like)))
    shape, strides, dtype = like.shape, like.stride(), maps.dtype

    def multiply(
        maps: Tensor,
        weight: Tensor,
        lists: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=dtype)
        rest = (
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            *(activation, result.data_ptr()),
        )
        if lists is not None:
            try:
                run(maps.data_ptr(), kind, layouts, given, lists.data_ptr(), 8 * len(lists), *rest)
                return result
            except ValueError:  # of another size, or made on another kind of processor
                pass
        made = torch.empty(size, dtype=torch.uint8)
        make(weight.data_ptr(), kind, last, given, made.data_ptr(), size)
        run(maps.data_ptr(), kind, layouts, given, made.data_ptr(), size, *rest)
        return result

    return multiply


# Numbers that decide in compiled code are literals: torch.compile(dynamic=True) makes symbols of a
# module's numbers, and a symbol of one layer's graph cannot be compared in another's.
def are_few(share: float) -> bool:
    """True of a share of zeros below which no measurement is worth its time."""
    return share < 0.25


def cost_of(operands: Output | GradInput | GradWeight, speed: float, share: float) -> float:
    """Predicted time, relative to the dense product, of a kernel that skips a share of zeros.

    Args:
        speed: of the kernel's multiply-adds, relative to the library's.
    """
    cost = max(1 - share, 0.05) / speed
    if isinstance(operands, GradWeight) and operands.joint:  # half of the work is a dense dX
        cost = (1 + cost) / 2
    is_small = operands.multiply_adds < 2**24
    return 100.0 * cost if is_small else cost


class ZerosOfWeight(Backend):
    """Lists of the weights that are not zero; vectors run over images or pixels."""

    name = "zeros_weight"
    computes = {
        "output": "C++ for CPUs: zeros of the weight are skipped",
        "grad_input": "C++ for CPUs: zeros of the weight are skipped",
    }

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Output | GradInput) -> str:
        if isinstance(operands, Output):
            reason = refuses_zeros(operands.input, operands.weight, operands.geometry)
        else:
            maps = (operands.grad_output, operands.weight, operands.geometry)
            reason = refuses_zeros(*maps, operands.input_shape)
        few = are_few(operands.zeros.weight)
        return reason or (f"{NO_GAIN}few weights are zero" if few else "")

    def cost(self, operands: Output | GradInput) -> float:
        return cost_of(operands, 0.7, operands.zeros.weight)

    def skipped(self, operands: Output | GradInput) -> str:
        return f"zeros of W, {operands.zeros.weight:.0%}"

    def output(self, operands: Output) -> Callable[[Output], Tensor]:
        bias = _single(operands.bias)
        given = (operands.input, operands.weight, None, bias, None, *operands.geometry)
        multiply = zeros_output.plan(*given)
        if bias is None:
            return lambda o: multiply(o.input, o.weight, None, None, None)
        return lambda o: multiply(o.input, o.weight, None, _single(o.bias), None)

    def grad_input(self, operands: GradInput) -> Callable[[GradInput], Tensor]:
        given = (operands.grad_output, operands.weight, operands.input_shape, *operands.geometry)
        multiply = zeros_grad_input.plan(*given)
        return lambda o: multiply(o.grad_output, o.weight)

    drawn_grad_input = grad_input


def _single(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


register_backend(ZerosOfWeight())
