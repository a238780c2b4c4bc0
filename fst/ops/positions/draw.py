"""Lists of output positions: drawn by importance, or fixed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst.ops import cpp
from fst.ops.geometry import geometry_of, is_channels_last, pair_of, positions_of
from fst.rules.rule import Lattice

FIXED_KNOWN = 64  # lists of lattices that are kept


class Listed(NamedTuple):
    """A list of output positions, and what is multiplied at each.

    Attributes:
        places: (n,) int32, positions of the convolution's output map.
        scale: (n,) what grad_output is multiplied by; None: 1 everywhere.
        mean: (Cin,), which is subtracted from the input inside the image; None: nothing is.
        sums: (Cout, kh, kw), Σ dY over all positions that see the image through each tap: what
            ``mean`` is multiplied by and added. None where there is no mean.
        source: (n,) int32, which rows of grad_output; None: the same as ``places``.
    """

    places: Tensor
    scale: Tensor | None = None
    mean: Tensor | None = None
    sums: Tensor | None = None
    source: Tensor | None = None


def count_of(share: float, positions: int) -> int:
    """⌈share · positions⌉, without what rounding adds to it."""
    return min(positions, -int(-share * positions * (1 - 1e-12) // 1))


def fixed(lattice: Lattice, samples: int, size: tuple[int, int], device: torch.device) -> Listed:
    """The positions of ``lattice`` in ``samples`` output maps of that size.

    ``source`` counts rows of what `Rule.summed` returns for it.
    """
    if torch.compiler.is_compiling():
        return _fixed(lattice, samples, size, device)
    return _known(lattice, samples, size, device)


def _fixed(lattice: Lattice, samples: int, size: tuple[int, int], device: torch.device) -> Listed:
    height, width = size
    every = torch.arange(samples * height * width, dtype=torch.int32, device=device)
    index = lattice.of(every.view(samples, 1, height, width)).reshape(-1).contiguous()
    source = torch.arange(len(index), dtype=torch.int32, device=device)
    return Listed(index, source=source)


_known = functools.lru_cache(FIXED_KNOWN)(_fixed)


def _like_measured(
    grad_output: Tensor, kernel_size: Sequence[int], with_sums: bool
) -> tuple[Tensor, Tensor]:
    samples, channels, rows, columns = grad_output.shape
    sums = (channels, *kernel_size) if with_sums else (0,)
    empty = functools.partial(grad_output.new_empty, dtype=torch.float32)
    return empty(samples * rows * columns), empty(sums)


@cpp.operator(like=_like_measured, tensors=1, returns="tuple[Tensor, Tensor]")
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
    cpp.check_operands(grad_output=grad_output)
    samples, channels = grad_output.shape[:2]
    size = (samples, channels, *pair_of("input_size", input_size[-2:]))
    shape = (channels, channels, *pair_of("kernel_size", kernel_size))
    geometry = geometry_of(stride, padding, dilation, 1)
    numbers, _ = cpp.convolution(size, shape, geometry)
    cpp.check_map(grad_output, size, shape, geometry)
    positions = positions_of(grad_output)
    sums_shape = (channels, *shape[2:]) if with_sums else (0,)
    run, given = cpp.kernel("fst_measure_positions"), cpp.integers(*numbers)
    form = cpp.KINDS[grad_output.dtype], channels, is_channels_last(grad_output), given

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


@cpp.operator(like=_like_drawn, tensors=3, returns="tuple[Tensor, Tensor]")
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
    cpp.check_plain(torch.float32, (scores.numel(),), scores=scores)
    cpp.check_plain(torch.float64, (), start=start)
    if n < 0:
        raise ValueError(f"n={n} must not be negative.")
    if not 0 <= (value := float(start)) < 1:
        raise ValueError(f"start={value} must be in [0, 1).")
    if len(scores) > cpp.MOST_POSITIONS:
        raise ValueError(
            f"{len(scores)} scores are more than a list can name: {cpp.MOST_POSITIONS}."
        )
    run = cpp.kernel("fst_draw_positions")

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
