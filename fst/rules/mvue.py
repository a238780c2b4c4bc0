"""N:M pruning that is exact in the mean, with the least variance (MVUE).

Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023
(arXiv 2203.10991). An element a_i of a group is kept with probability π_i and becomes a_i/π_i. The
variance Σ a_i²(1/π_i − 1) under Σ π_i = n is least for π_i = min(1, c·|a_i|).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).movedim(dim, -1)
    groups = F.pad(wide, (0, -size % m)).unflatten(-1, (-1, m))
    draw = _approximate if approximate else _systematic
    drawn = draw(groups, n, generator)
    drawn = torch.where(groups.abs().sum(-1, keepdim=True).isfinite(), drawn, groups)
    result = drawn.flatten(-2).narrow(-1, 0, size).movedim(-1, dim)
    return torch.empty_like(tensor).copy_(result)


def _uniform(groups: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Numbers from [0, 1), ``count`` for each group (..., m)."""
    device = groups.device if generator is None else generator.device
    shape = (*groups.shape[:-1], count)
    return torch.rand(shape, generator=generator, device=device, dtype=groups.dtype).to(
        groups.device
    )


def _systematic(groups: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    magnitude = groups.abs()
    certain = torch.zeros_like(magnitude, dtype=torch.bool)
    for _ in range(n):
        left, scale = _left(magnitude, certain, n)
        certain = certain | ((magnitude >= scale) & (scale > 0))
    left, scale = _left(magnitude, certain, n)
    chances = torch.where(certain | (scale == 0), 0, magnitude / scale).nan_to_num()
    start = -_uniform(groups, 1, generator)
    reached = torch.cat([start, torch.minimum(chances.cumsum(-1), left) + start], -1).floor()
    kept = reached[..., 1:] > reached[..., :-1]
    return torch.where(certain, groups, torch.where(kept, groups.sign() * scale, 0))


def _left(magnitude: Tensor, certain: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """How many are to be drawn beside the certain ones, and 1/c (..., 1)."""
    left = n - certain.sum(-1, keepdim=True)
    rest = magnitude.masked_fill(certain, 0).sum(-1, keepdim=True)
    return left, torch.where(left > 0, rest / left.clamp(min=1), 0)


def _approximate(groups: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    magnitude = groups.abs() + EPSILON
    share = magnitude / magnitude.sum(-1, keepdim=True)
    chances = share + magnitude * _of_others(share / _of_others(magnitude))
    draws = _uniform(groups, 2, generator)
    first = _drawn(magnitude, draws[..., :1])
    second = _drawn(magnitude.masked_fill(first, 0), draws[..., 1:])
    return torch.where(first | second, groups / chances, 0)


def _of_others(values: Tensor) -> Tensor:
    """The sum of each group (..., m) without the element itself, free of cancellation."""
    result = torch.zeros_like(values)
    for shift in range(1, values.shape[-1]):
        result += values.roll(shift, -1)
    return result


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Mask of one element of each group (..., m), drawn in proportion to ``weights``."""
    reached = weights.cumsum(-1)
    index = (reached <= uniform * reached[..., -1:]).sum(-1, keepdim=True)
    last = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    index = torch.minimum(index, last.amax(-1, keepdim=True))
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, index, True)
