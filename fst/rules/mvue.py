"""N:M pruning that is exact in the mean, with the least variance (MVUE).

Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023
(arXiv 2203.10991). An element a_i of a group is kept with probability π_i and becomes a_i/π_i. The
variance Σ a_i²(1/π_i − 1) under Σ π_i = n is least for π_i = min(1, c·|a_i|).
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.rules.masks import samples_in_cache

EPSILON = 1.19209e-07  # of the official approximation


def mvue(
    tensor: Tensor,
    n: int,
    m: int,
    dim: int,
    generator: torch.Generator | None = None,
    *,
    approximate: bool = False,
) -> Tensor:
    """``tensor`` with at most ``n`` non-zero of every ``m`` elements along ``dim``, unbiased.

    Elements with π = 1 stay as they are. The others are drawn systematically: with C_i = Σ_{j≤i}
    π_j and one u from [0, 1) for each group, element i is kept where ⌊C_i − u⌋ > ⌊C_{i−1} − u⌋. A
    group whose sum is not finite stays as it is, so that infinities are seen.

    Args:
        tensor: any shape, floating point.
        n, m: 1 <= n < m; with ``approximate`` 2:4 alone.
        dim: the axis along which groups run; a last group of r < m elements keeps min(n, r).
        generator: source of randomness; torch's default generator if None.
        approximate: draw one element by |a_i|, then another one by the rest, and divide by the
            probability of either (`huyz2023/2by4-pretrain`, "approx-MVUE").
    """
    if not tensor.numel():
        return tensor.clone()
    dim %= tensor.dim()
    size = tensor.shape[dim]
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).movedim(dim, 0)
    padding = (0, 0) * (tensor.dim() - 1) + (0, -size % m)
    groups = F.pad(wide, padding).unflatten(0, (-1, m)).movedim(1, 0)
    uniform = _uniform(groups, 2 if approximate else 1, generator).flatten(1)
    flat = groups.flatten(1)
    drawn = torch.empty_like(flat)
    draw = _approximate if approximate else _systematic
    part = samples_in_cache(flat.T)
    parts = (whole.split(part, 1) for whole in (flat, uniform, drawn))
    for values, draws, target in zip(*parts, strict=True):
        finite = values.abs().sum(0).isfinite()
        target.copy_(torch.where(finite, draw(values, n, draws), values))
    result = drawn.view_as(groups).movedim(0, 1).flatten(0, 1).narrow(0, 0, size).movedim(0, dim)
    return torch.empty_like(tensor).copy_(result)


def _uniform(groups: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Numbers from [0, 1), ``count`` for each group of (m, groups, ...): (count, groups, ...)."""
    device = groups.device if generator is None else generator.device
    shape = (*groups.shape[2:], groups.shape[1], count)
    draws = torch.empty(shape, device=device, dtype=groups.dtype).uniform_(generator=generator)
    return draws.to(groups.device).movedim((-1, -2), (0, 1))


def _systematic(groups: Tensor, n: int, uniform: Tensor) -> Tensor:
    magnitude = groups.abs()
    free = torch.ones_like(magnitude)  # 0 for elements that are kept for certain, else 1
    for _ in range(n):
        scale, left = _scale(magnitude, free, n)
        free *= magnitude < scale.masked_fill_(left < 1, math.inf)
    scale, left = _scale(magnitude, free, n)
    chances = magnitude.mul_(free).div_(scale.clamp(min=torch.finfo(scale.dtype).tiny))
    result = groups.sign().mul_(scale)
    start = uniform[0]
    reached, before = torch.zeros_like(scale), (-start).floor_()
    for chance, drawn in zip(chances, result, strict=True):
        reached += chance
        after = torch.minimum(reached, left).sub_(start).floor_()
        drawn *= after > before
        before = after
    return result.addcmul_(groups, 1 - free)


def _scale(magnitude: Tensor, free: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """1/c of each group (m, ...), and how many elements are to be drawn of the free ones."""
    left = free.sum(0) + (n - len(free))
    return (magnitude * free).sum(0) / left.clamp(min=1), left


def _approximate(groups: Tensor, n: int, uniform: Tensor) -> Tensor:
    magnitude = groups.abs().add_(EPSILON)
    share = magnitude / magnitude.sum(0)
    chances = _of_others(share / _of_others(magnitude)).mul_(magnitude).add_(share)
    first = _drawn(magnitude, uniform[0])
    second = _drawn(magnitude.mul_(~first), uniform[1])
    return (groups / chances).mul_(first | second)


def _of_others(values: Tensor) -> Tensor:
    """The sum of each group (4, ...) without the element itself, free of cancellation."""
    pairs = values.unflatten(0, (2, 2))
    return (pairs.flip(1) + pairs.sum(1, keepdim=True).flip(0)).flatten(0, 1)


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Mask of one element of each group (m, ...), drawn in proportion to ``weights``."""
    reached = weights.clone()
    for before, after in itertools.pairwise(reached):
        after += before
    below = torch.nextafter(reached[-1], torch.zeros_like(uniform))
    passed = reached <= torch.minimum(uniform * reached[-1], below)
    mask = ~passed
    mask[1:] &= passed[:-1]
    return mask
