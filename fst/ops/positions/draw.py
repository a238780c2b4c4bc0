"""Lists of output positions: drawn by importance, or fixed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.ops import cpp
from fst.ops.geometry import Geometry
from fst.ops.positions.products import Listed
from fst.rules.rule import Lattice
from fst.rules.sampled import Positions, Sampled

FIXED_KNOWN = 64  # lists of lattices that are kept


class Scored(NamedTuple):
    """The results of one pass over grad_output.

    Attributes:
        scores: (N·P·Q,) what the probability of each position is proportional to.
        sums: (Cout, kh, kw) Σ dY over the positions whose tap lies inside the image, contiguous;
            empty where nobody asked for it.
    """

    scores: Tensor
    sums: Tensor


def score(
    rule: Sampled,
    grad_output: Tensor,
    input_size: tuple[int, int],
    kernel: tuple[int, int],
    geometry: Geometry,
    *,
    with_sums: bool,
    planned: dict[Any, Callable[..., Any]],
    column_norms: Callable[[], Tensor] | None = None,
) -> Scored:
    """Scores of the positions of grad_output (N, Cout, P, Q), and its sums for centring.

    Args:
        planned: kernels by the form of grad_output.
        column_norms: see `Sampled.scores`.
    """
    form = grad_output.shape, grad_output.stride(), with_sums
    if form in planned:
        return Scored(*planned[form](grad_output))
    if grad_output[:, 0].numel() > cpp.MOST_POSITIONS:
        raise ValueError(
            f"grad_output has shape {tuple(grad_output.shape)}: more than {cpp.MOST_POSITIONS} "
            "output positions cannot be sampled; use a smaller batch."
        )
    # The kernel knows the rule's own scores; a subclass may have others.
    if type(rule).scores is Sampled.scores and not cpp.refuses_lists(grad_output):
        where = (input_size, kernel, geometry.stride, geometry.padding, geometry.dilation)
        planned[form] = cpp.measure_positions.plan(grad_output, *where, with_sums)
        return Scored(*planned[form](grad_output))
    scores = rule.scores(grad_output, column_norms)
    if not with_sums:
        return Scored(scores, scores.new_empty(0))
    size = (grad_output.shape[2], grad_output.shape[3])
    axes = zip(size, input_size, kernel, *geometry[:3], strict=True)
    rows, columns = (inside(*axis, like=scores) for axis in axes)
    total = grad_output.sum(0, dtype=scores.dtype)
    return Scored(scores, torch.einsum("rp,opq,sq->ors", rows, total, columns).contiguous())


def inside(
    size: int, input_size: int, taps: int, stride: int, padding: int, dilation: int, *, like: Tensor
) -> Tensor:
    """1 where a tap of an output position lies inside the image, along one axis: (taps, size)."""
    positions = torch.arange(size, device=like.device) * stride - padding
    places = positions + torch.arange(taps, device=like.device)[:, None] * dilation
    return ((places >= 0) & (places < input_size)).to(like.dtype)


def choose(
    rule: Sampled,
    scores: Tensor,
    count: int,
    start: Tensor,
    planned: dict[Any, Callable[..., Any]],
) -> Positions:
    """`Sampled.choose`, in C++ where it can be."""
    form = "choose", scores.dtype
    if form in planned:
        return Positions(*planned[form](scores, count, start.cpu()))
    if type(rule).choose is Sampled.choose and _kernels_take(scores):
        planned[form] = cpp.draw_positions.plan(scores, count, start.cpu())
        return Positions(*planned[form](scores, count, start.cpu()))
    return rule.choose(scores, count, start)


def _kernels_take(scores: Tensor) -> bool:
    on_cpu = type(scores) is Tensor and scores.device.type == "cpu"
    return on_cpu and scores.dtype == torch.float32 and not cpp.missing()


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
