"""Lists of output positions, and gradients from them, by the C++ kernels.

A list names output positions i = (n·P + p)·Q + q of a convolution, int32 and ascending, each with a
weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fst.ops.cpp.library import (
    KINDS,
    MOST_POSITIONS,
    call,
    check_list,
    check_map,
    check_operands,
    check_plain,
    convolution,
    integers,
    missing,
    operator,
    pointer,
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
    grad_output: Tensor, kernel: Sequence[int], with_sums: bool
) -> tuple[Tensor, Tensor]:
    samples, channels, rows, columns = grad_output.shape
    sums = (channels, *kernel) if with_sums else (0,)
    empty = functools.partial(grad_output.new_empty, dtype=torch.float32)
    return empty(samples * rows * columns), empty(sums)


@operator(like=_like_measured)
def measure_positions(
    grad_output: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
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
    shape = (channels, channels, *pair_of("kernel", kernel))
    geometry = geometry_of(stride, padding, dilation, 1)
    numbers, _ = convolution(size, shape, geometry)
    check_map(grad_output, size, shape, geometry)
    scores, sums = _like_measured(grad_output, kernel, with_sums)
    if not scores.numel():
        return scores, sums.zero_()
    maps = (grad_output.data_ptr(), KINDS[grad_output.dtype], channels)
    call(
        "fst_measure_positions",
        *(*maps, is_channels_last(grad_output), integers(*numbers)),
        *(scores.data_ptr(), sums.data_ptr() if with_sums else None),
    )
    return scores, sums


def _like_drawn(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    size = torch.sym_min(n, len(scores))
    return scores.new_empty(size, dtype=torch.int32), scores.new_empty(size)


@operator(like=_like_drawn)
def draw_positions(scores: Tensor, n: int, start: Tensor) -> tuple[Tensor, Tensor]:
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
    index, weight = _like_drawn(scores, n)
    if n >= len(scores):
        torch.arange(len(scores), out=index)
        weight.fill_(1)
    elif n:
        call(
            "fst_draw_positions",
            *(scores.data_ptr(), len(scores), n, start.data_ptr()),
            *(index.data_ptr(), weight.data_ptr()),
        )
    return index, weight


def _like_grad_weight(
    grad_output: Tensor, weight_shape: Sequence[int], channels_last: bool
) -> Tensor:
    return empty_maps(weight_shape, grad_output, channels_last)


@operator(like=_like_grad_weight)
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
) -> Tensor:
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
    weight = torch.ones(index.numel(), dtype=torch.float32) if weight is None else weight
    check_list(index, weight, samples * height * width)
    check_plain(torch.float32, (input.shape[1],), mean=mean)
    check_plain(torch.float32, (out, *weight_shape[2:]), sums=sums)
    rows, places = positions_of(grad_output), math.prod(grad_output.shape[2:])
    if source is None:
        check_map(grad_output, input.shape, weight_shape, geometry)
    elif grad_output.shape[1] != out:
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have {out} channels.")
    else:
        _check_source(source, index, rows)
    result = _like_grad_weight(grad_output, weight_shape, channels_last)
    if not len(index) or not result.numel():
        if mean is None or sums is None:
            return result.zero_()
        return result.copy_(share_of_mean(sums, mean, groups))
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(result))
    call(
        "fst_list_grad_weight",
        *(grad_output.data_ptr(), input.data_ptr(), KINDS[input.dtype]),
        *(index.data_ptr(), weight.data_ptr(), pointer(source), len(index)),
        *(places, rows, pointer(mean), None if mean is None else pointer(sums)),
        *(integers(*numbers), *channels, integers(*layouts), result.data_ptr()),
    )
    return result


def _like_grad_input(grad_output: Tensor, input_size: Sequence[int]) -> Tensor:
    return empty_maps(input_size, grad_output, is_channels_last(grad_output))


@operator(like=_like_grad_input)
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
) -> Tensor:
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
    result = _like_grad_input(grad_output, input_size)
    if not len(index) or not result.numel():
        return result.zero_()
    layouts = (is_channels_last(grad_output), is_channels_last(weight))
    call(
        "fst_list_grad_input",
        *(grad_output.data_ptr(), weight.data_ptr(), KINDS[weight.dtype]),
        *(index.data_ptr(), list_weight.data_ptr(), len(index), integers(*numbers)),
        *(*channels, integers(*layouts), result.data_ptr()),
    )
    return result


def _check_source(source: Tensor, index: Tensor, rows: int) -> None:
    check_plain(torch.int32, (len(index),), source=source)
    if not len(source):
        return
    low, high = torch.aminmax(source)
    if low < 0 or high >= rows:
        raise ValueError(f"source from {low} to {high} must be rows of grad_output, 0 to {rows}.")
