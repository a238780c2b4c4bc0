"""Lists of output positions, and gradients from them, by the C++ kernels.

A list names output positions i = (n·P + p)·Q + q of a convolution, int32 and ascending, each with a
weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fst.ops.cpp.library import (
    KINDS,
    MOST_POSITIONS,
    check_list,
    check_map,
    check_operands,
    check_plain,
    convolution,
    integers,
    kernel,
    missing,
    operator,
    refuses_operands,
)
from fst.ops.geometry import (
    empty_maps,
    geometry_of,
    is_channels_last,
    output_shape,
    pair_of,
    positions_of,
    share_of_mean,
)


def refuses_lists(*operands: Tensor) -> str:
    """The reason why the kernels of lists cannot read these (N, C, H, W); "" if they can."""
    return missing() or refuses_operands(*operands)


def _like_measured(
    grad_output: Tensor, kernel_size: Sequence[int], with_sums: bool
) -> tuple[Tensor, Tensor]:
    samples, channels, rows, columns = grad_output.shape
    sums = (channels, *kernel_size) if with_sums else (0,)
    empty = functools.partial(grad_output.new_empty, dtype=torch.float32)
    return empty(samples * rows * columns), empty(sums)


@operator(like=_like_measured, tensors=1, returns="tuple[Tensor, Tensor]")
def measure_positions(
    grad_output: Tensor,
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    with_sums: bool,
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Scores of the output positions, and sums of grad_output for each tap.

    Args:
        grad_output: (N, Cout, P, Q).
        input_size: of the convolution's input; its last two numbers count.
        with_sums: whether the sums are wanted.

    Returns:
        scores (N·P·Q,) float32: norms of grad_output over the channels; sums (Cout, kh, kw)
        float32: of grad_output over the positions whose tap lies inside the image (empty without
        ``with_sums``).
    """
    check_operands(grad_output=grad_output)
    samples, channels = grad_output.shape[:2]
    size = (samples, channels, *pair_of("input_size", input_size[-2:]))
    shape = (channels, channels, *pair_of("kernel_size", kernel_size))
    geometry = geometry_of(stride, padding, dilation, 1)
    numbers, _ = convolution(size, shape, geometry)
    check_map(grad_output, size, shape, geometry)
    positions = positions_of(grad_output)
    sums_shape = (channels, *shape[2:]) if with_sums else (0,)
    run, given = kernel("fst_measure_positions"), integers(*numbers)
    form = KINDS[grad_output.dtype], channels, is_channels_last(grad_output), given

    def measure(grad_output: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.empty(positions, dtype=torch.float32)
        sums = torch.empty(sums_shape, dtype=torch.float32)
        if not positions:
            return scores, sums.zero_()
        to = scores.data_ptr(), sums.data_ptr() if with_sums else None
        run(grad_output.data_ptr(), *form, *to)
        return scores, sums

    return measure


def _like_drawn(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    size = torch.sym_min(n, len(scores))
    return scores.new_empty(size, dtype=torch.int32), scores.new_empty(size)


@operator(like=_like_drawn, tensors=3, returns="tuple[Tensor, Tensor]")
def draw_positions(
    scores: Tensor, n: int, start: Tensor
) -> Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]:
    """A systematic draw of positions, with probabilities in proportion to their scores.

    Args:
        scores: (M,) float32; what is not finite is kept.
        n: how many positions; all of them if n ≥ M.
        start: float64 without dimensions, in [0, 1).

    Returns:
        index (n,) int32, ascending; weight (n,) float32: reciprocals of the probabilities.
    """
    check_plain(torch.float32, (scores.numel(),), scores=scores)
    check_plain(torch.float64, (), start=start)
    if n < 0:
        raise ValueError(f"n={n} must not be negative.")
    if not 0 <= (value := float(start)) < 1:
        raise ValueError(f"start={value} must be in [0, 1).")
    if len(scores) > MOST_POSITIONS:
        raise ValueError(f"{len(scores)} scores are more than a list can name: {MOST_POSITIONS}.")
    run = kernel("fst_draw_positions")

    def draw(scores: Tensor, n: int, start: Tensor) -> tuple[Tensor, Tensor]:
        count = scores.numel()
        if n >= count:
            return torch.arange(count, dtype=torch.int32), torch.ones(count)
        index, weight = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.float32)
        if n:
            to = index.data_ptr(), weight.data_ptr()
            run(scores.data_ptr(), count, n, start.data_ptr(), *to)
        return index, weight

    return draw


def _like_grad_weight(
    grad_output: Tensor, weight_shape: Sequence[int], channels_last: bool
) -> Tensor:
    return empty_maps(weight_shape, grad_output, channels_last)


@operator(like=_like_grad_weight, tensors=7)
def list_grad_weight(
    grad_output: Tensor,
    input: Tensor,
    index: Tensor,
    weight: Tensor | None,
    source: Tensor | None,
    mean: Tensor | None,
    sums: Tensor | None,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
) -> Callable[..., Tensor]:
    """The weight gradient over a list: Σ_j weight_j · dY[source_j] · (X − mean)[window j]ᵀ, and
    sums · meanᵀ for each tap.

    Args:
        grad_output: (N', Cout, P', Q').
        input: (N, Cin, H, W).
        index: (n,) int32, positions of the convolution's output map, ascending.
        weight: (n,) float32; None: 1 everywhere.
        source: (n,) int32, rows of grad_output, whose map may be another; None: ``index``.
        mean: (Cin,) float32, subtracted from the input inside the image; None: nothing is.
        sums: (Cout, kh, kw) float32, which ``mean`` is multiplied by; None: nothing is added.
        weight_shape: (Cout, Cin/groups, kh, kw).
        channels_last: the memory format of the result.

    Returns:
        dW of ``weight_shape``, in the dtype of grad_output.
    """
    check_operands(grad_output=grad_output, input=input)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers, channels = convolution(input.shape, weight_shape, geometry)
    samples, out, height, width = output_shape(input.shape, weight_shape, geometry)
    positions = samples * height * width
    check_list(index, weight, positions)
    check_plain(torch.float32, (input.shape[1],), mean=mean)
    check_plain(torch.float32, (out, *weight_shape[2:]), sums=sums)
    rows, places = positions_of(grad_output), math.prod(grad_output.shape[2:])
    if source is None:
        check_map(grad_output, input.shape, weight_shape, geometry)
    elif grad_output.shape[1] != out:
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have {out} channels.")
    else:
        _check_source(source, index, rows)
    like = _like_grad_weight(grad_output, weight_shape, channels_last)
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(like))
    run, kind = kernel("fst_list_grad_weight"), KINDS[input.dtype]
    last, shape, strides = (
        (integers(*numbers), *channels, integers(*layouts)),
        like.shape,
        like.stride(),
    )

    def multiply(
        grad_output: Tensor,
        input: Tensor,
        index: Tensor,
        weight: Tensor | None,
        source: Tensor | None,
        mean: Tensor | None,
        sums: Tensor | None,
    ) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if not index.numel() or not result.numel():
            if mean is None or sums is None:
                return result.zero_()
            return result.copy_(share_of_mean(sums, mean, groups))
        if weight is None:
            weight = torch.ones(index.numel(), dtype=torch.float32)
        run(
            *(grad_output.data_ptr(), input.data_ptr(), kind, index.data_ptr(), weight.data_ptr()),
            *(None if source is None else source.data_ptr(), index.numel(), places, rows),
            None if mean is None else mean.data_ptr(),
            None if mean is None or sums is None else sums.data_ptr(),
            *(*last, result.data_ptr()),
        )
        return result

    return multiply


def _like_grad_input(grad_output: Tensor, input_size: Sequence[int]) -> Tensor:
    return empty_maps(input_size, grad_output, is_channels_last(grad_output))


@operator(like=_like_grad_input, tensors=4)
def list_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    index: Tensor,
    list_weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The input gradient from a list: Σ_j list_weight_j · Wᵀ dY[index_j], added at the taps.

    Args:
        grad_output: (N, Cout, P, Q).
        weight: (Cout, Cin/groups, kh, kw).
        index: (n,) int32, positions of grad_output, ascending.
        list_weight: (n,) float32.
        input_size: (N, Cin, H, W).

    Returns:
        dX of ``input_size``, in the dtype and memory format of grad_output.
    """
    check_operands(grad_output=grad_output, weight=weight)
    geometry = geometry_of(stride, padding, dilation, groups)
    numbers, channels = convolution(input_size, weight.shape, geometry)
    check_map(grad_output, input_size, weight.shape, geometry)
    check_list(index, list_weight, positions_of(grad_output))
    like = _like_grad_input(grad_output, input_size)
    run, kind = kernel("fst_list_grad_input"), KINDS[weight.dtype]
    layouts = (is_channels_last(grad_output), is_channels_last(weight))
    given, last = integers(*numbers), (*channels, integers(*layouts))
    shape, strides = like.shape, like.stride()

    def multiply(grad_output: Tensor, weight: Tensor, index: Tensor, list_weight: Tensor) -> Tensor:
        result = torch.empty_strided(shape, strides, dtype=grad_output.dtype)
        if not index.numel() or not result.numel():
            return result.zero_()
        run(
            *(grad_output.data_ptr(), weight.data_ptr(), kind, index.data_ptr()),
            *(list_weight.data_ptr(), index.numel(), given, *last, result.data_ptr()),
        )
        return result

    return multiply


def _check_source(source: Tensor, index: Tensor, rows: int) -> None:
    check_plain(torch.int32, (index.numel(),), source=source)
    if not source.numel():
        return
    low, high = torch.aminmax(source)
    if low < 0 or high >= rows:
        raise ValueError(f"source from {low} to {high} must be rows of grad_output, 0 to {rows}.")
