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
    call,
    check_groups,
    check_operands,
    check_plain,
    integers,
    missing,
    operator,
    pointer,
    refuses_operands,
)
from fst.ops.geometry import (
    Geometry,
    empty_maps,
    is_channels_last,
    output_shape,
    share_of_mean,
)

MOST_POSITIONS = 2**31 - 1  # an index has 32 bits


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
    samples, channels, rows, columns = grad_output.shape
    size = (samples, channels, *input_size[-2:])
    map = _output_map(size, kernel, stride, padding, dilation)
    if map != (rows, columns):
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have an output map {map}.")
    scores, sums = _like_measured(grad_output, kernel, with_sums)
    if not scores.numel():
        return scores, sums.zero_()
    geometry = (samples, *size[2:], rows, columns, *kernel, *stride, *padding, *dilation)
    maps = (grad_output.data_ptr(), KINDS[grad_output.dtype], channels)
    call(
        "fst_measure_positions",
        *(*maps, is_channels_last(grad_output), integers(*geometry)),
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
    _check_shape("weight_shape", weight_shape)
    out, inside, *kernel = weight_shape
    check_groups(groups, out)
    samples, channels, height, width = input.shape
    if channels != inside * groups or grad_output.shape[1] != out:
        raise ValueError(
            f"weight_shape={tuple(weight_shape)} with groups={groups} does not fit input "
            f"{tuple(input.shape)} and grad_output {tuple(grad_output.shape)}."
        )
    map = _output_map(input.shape, kernel, stride, padding, dilation)
    weight = torch.ones(index.numel()) if weight is None else weight
    _check_list(index, weight, samples * math.prod(map))
    check_plain(torch.float32, (channels,), mean=mean)
    check_plain(torch.float32, (out, *kernel), sums=sums)
    places = grad_output.shape[2] * grad_output.shape[3]
    rows = len(grad_output) * places
    if source is not None:
        _check_source(source, index, rows)
    elif (len(grad_output), *grad_output.shape[2:]) != (samples, *map):
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have an output map {map}.")
    result = _like_grad_weight(grad_output, weight_shape, channels_last)
    if not len(index) or not result.numel():
        if mean is None or sums is None:
            return result.zero_()
        return result.copy_(share_of_mean(sums, mean, groups))
    numbers = (samples, height, width, *map, *kernel, *stride, *padding, *dilation)
    layouts = (is_channels_last(input), is_channels_last(grad_output), is_channels_last(result))
    call(
        "fst_list_grad_weight",
        *(grad_output.data_ptr(), input.data_ptr(), KINDS[input.dtype]),
        *(index.data_ptr(), weight.data_ptr(), pointer(source), len(index)),
        *(places, rows, pointer(mean), None if mean is None else pointer(sums)),
        *(integers(*numbers), inside, out // groups, groups, integers(*layouts)),
        result.data_ptr(),
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
    _check_shape("input_size", input_size)
    out, inside, *kernel = weight.shape
    check_groups(groups, out)
    samples, channels, height, width = input_size
    map = _output_map(input_size, kernel, stride, padding, dilation)
    wanted = (samples, out, *map)
    if channels != inside * groups or grad_output.shape != wanted:
        raise ValueError(
            f"weight {tuple(weight.shape)} with groups={groups} and input_size={tuple(input_size)} "
            f"do not fit grad_output {tuple(grad_output.shape)}."
        )
    _check_list(index, list_weight, samples * math.prod(map))
    result = _like_grad_input(grad_output, input_size)
    if not len(index) or not result.numel():
        return result.zero_()
    numbers = (samples, height, width, *map, *kernel, *stride, *padding, *dilation)
    layouts = (is_channels_last(grad_output), is_channels_last(weight))
    call(
        "fst_list_grad_input",
        *(grad_output.data_ptr(), weight.data_ptr(), KINDS[weight.dtype]),
        *(index.data_ptr(), list_weight.data_ptr(), len(index), integers(*numbers)),
        *(inside, out // groups, groups, integers(*layouts), result.data_ptr()),
    )
    return result


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 4 or min(shape) < 0:
        raise ValueError(f"{name}={tuple(shape)} must be four sizes.")


def _output_map(
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Rows and columns of a convolution of (N, C, H, W).

    Raises:
        ValueError: there is no such convolution, or a list cannot name its positions.
    """
    least = {"kernel": (kernel, 1), "stride": (stride, 1), "dilation": (dilation, 1)}
    least |= {"padding": (padding, 0), "input_size": (input_size[2:], 0)}
    for name, (pair, low) in least.items():
        if len(pair) != 2 or not all(low <= number <= MOST_POSITIONS for number in pair):
            raise ValueError(
                f"{name}={tuple(pair)} must be two numbers from {low} to {MOST_POSITIONS}."
            )
    window = Geometry(
        *((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1])), groups=1
    )
    samples, _, rows, columns = output_shape(input_size, (1, 1, *kernel), window)
    if rows < 1 or columns < 1:
        raise ValueError(
            f"kernel={tuple(kernel)} with dilation={tuple(dilation)} is larger than an input of "
            f"{tuple(input_size[2:])} with padding={tuple(padding)}."
        )
    if samples * rows * columns > MOST_POSITIONS:
        raise ValueError(
            f"{samples} images of {rows}x{columns} output positions are more than a list can "
            f"name: {MOST_POSITIONS}."
        )
    return rows, columns


def _check_list(index: Tensor, weight: Tensor, positions: int) -> None:
    size = (index.numel(),)
    check_plain(torch.int32, size, index=index)
    check_plain(torch.float32, size, weight=weight)
    if len(index) and not positions:
        raise ValueError(f"index names {len(index)} positions of an empty batch.")


def _check_source(source: Tensor, index: Tensor, rows: int) -> None:
    check_plain(torch.int32, (len(index),), source=source)
    if not len(source):
        return
    low, high = torch.aminmax(source)
    if low < 0 or high >= rows:
        raise ValueError(f"source from {low} to {high} must be rows of grad_output, 0 to {rows}.")
