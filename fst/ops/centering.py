"""What the mean of the input contributes to grad_weight, exactly, beside sampled positions.

With X = X̃ + μ inside the image, μ the mean per channel, and zeros in the padding,
dW = Σ dY·X̃ᵀ + (Σ dY)·μᵀ, where for each tap of the kernel the last sum is over the output positions
whose tap lies inside the image. A sum over sampled positions of dY·Xᵀ becomes that of dY·X̃ᵀ by
subtracting (Σ_sampled dY)·μᵀ. Both corrections are of rank one for each tap:
(Σ dY − scale · Σ_sampled dY)·μᵀ. Any μ that does not depend on the draw leaves the mean exact.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fst.ops.kept import KeptPositions

SHARE = 8  # the mean is that of one sample in so many


def mean(input: Tensor) -> Tensor:
    """μ (Cin) of (N, Cin, H, W), from the first eighth of the samples, one at least.

    The image has the uneven part of padding="same" in it, as elsewhere in the op.
    """
    if not input.numel():
        return input.new_zeros(input.shape[1])
    return input[: max(1, input.shape[0] // SHARE)].mean((0, 2, 3))


def with_share_of_mean(
    total: Tensor, grad_output: Tensor, mean: Tensor, kept: KeptPositions
) -> Tensor:
    """scale · ``total`` + (Σ dY − scale · Σ_kept dY)·μᵀ, (Cout, Cin/groups, kh, kw).

    ``total`` is the sum of dY·Xᵀ over the kept positions.
    """
    outputs, channels, *kernel = total.shape
    sums = _sums(grad_output, kept, (kernel[0], kernel[1])).to(total.dtype)
    groups, scale = kept.geometry.groups, kept.rule.scale
    if groups == 1 and (kernel == [1, 1] or not total.is_contiguous()):
        flat = total.permute(0, 2, 3, 1).reshape(-1, channels)
        flat = torch.addr(flat, sums.reshape(-1), mean, beta=scale)
        return flat.view(outputs, *kernel, channels).permute(0, 3, 1, 2)
    shares = mean.view(groups, 1, channels, 1, 1)
    corrections = sums.view(groups, outputs // groups, 1, *kernel) * shares
    return torch.add(corrections.view(total.shape), total, alpha=scale)


def _sums(grad_output: Tensor, kept: KeptPositions, kernel: tuple[int, int]) -> Tensor:
    """Σ dY − scale · Σ_kept dY over the positions whose tap is inside the image, (Cout, kh, kw).

    grad_output is read once: it is summed over each part of the batch, and the rest is small.
    """
    batch, outputs, height, width = grad_output.shape
    parts, scale = kept.lattices[0].parts, kept.rule.scale
    last = grad_output.is_contiguous(memory_format=torch.channels_last)
    samples = torch.arange(batch, device=grad_output.device)
    bounds = [batch * part // parts for part in range(parts + 1)]
    chosen = torch.stack([(samples >= a) & (samples < b) for a, b in itertools.pairwise(bounds)])
    laid_out = grad_output.permute(0, 2, 3, 1) if last else grad_output
    summed = chosen.to(grad_output.dtype) @ laid_out.reshape(batch, math.prod(laid_out.shape[1:]))
    exact = torch.promote_types(summed.dtype, torch.float32)
    summed = summed.to(exact).view(parts, *laid_out.shape[1:])
    order = "kpqo" if last else "kopq"
    axes = zip((height, width), kept.input_size, kernel, *kept.geometry[:3], strict=True)
    rows, columns = (_inside(*axis, like=summed) for axis in axes)
    kept_rows, kept_columns = summed.new_zeros(parts, height), summed.new_zeros(parts, width)
    for lattice in kept.lattices:
        kept_rows[lattice.part, lattice.row :: lattice.row_step] = 1
        kept_columns[lattice.part, lattice.column :: lattice.column_step] = 1
    whole = torch.einsum(f"ip,{order[1:]},jq->oij", rows, summed.sum(0), columns)
    of_rows, of_columns = rows * kept_rows[:, None], columns * kept_columns[:, None]
    part = torch.einsum(f"kip,{order},kjq->oij", of_rows, summed, of_columns)
    return whole - scale * part


def _inside(
    size: int, input_size: int, taps: int, stride: int, padding: int, dilation: int, *, like: Tensor
) -> Tensor:
    """1 where a tap of an output position lies inside the image, along one axis: (taps, size)."""
    positions = torch.arange(size, device=like.device) * stride - padding
    places = positions + torch.arange(taps, device=like.device)[:, None] * dilation
    return ((places >= 0) & (places < input_size)).to(like.dtype)
