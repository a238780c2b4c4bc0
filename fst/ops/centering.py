"""What the mean of the input contributes to grad_weight, exactly, beside sampled positions.

With X = X̃ + μ inside the image, μ the mean per channel, and zeros in the padding,
dW = Σ dY·X̃ᵀ + (Σ dY)·μᵀ, where for each tap of the kernel the last sum is over the output positions
whose tap lies inside the image. A sum over sampled positions of dY·Xᵀ becomes that of dY·X̃ᵀ by
subtracting (Σ_sampled dY)·μᵀ. Both corrections are of rank one for each tap:
(Σ dY − scale · Σ_sampled dY)·μᵀ. Any μ that does not depend on the draw leaves the mean exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fst.basics.known import remember
from fst.ops.kept import KeptPositions

SHARE = 8  # the mean is that of one sample in so many
MOST_KNOWN = 1024
_KNOWN: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


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
    return torch.add(corrections.reshape(total.shape), total, alpha=scale)


def _sums(grad_output: Tensor, kept: KeptPositions, kernel: tuple[int, int]) -> Tensor:
    """Σ dY − scale · Σ_kept dY over the positions whose tap is inside the image, (Cout, kh, kw).

    grad_output is read once, by one product with a few rows of weights of (sample, row); the
    weights of the columns then meet something small.
    """
    batch, outputs, height, width = grad_output.shape
    of_rows, of_columns = _weights(grad_output, kept, kernel)
    lines = grad_output.permute(0, 2, 3, 1).reshape(batch * height, width * outputs)
    summed = (of_rows @ lines).to(of_columns.dtype).view(-1, kernel[0], width, outputs)
    return (of_columns[:, None] @ summed).sum(0).permute(2, 0, 1)


def _weights(
    grad_output: Tensor, kept: KeptPositions, kernel: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Weights of (sample, row), (terms·kh, N·P), and of columns, (terms, kw, Q), of `_sums`.

    They depend on shapes alone and are many small operations, so they are made once.
    """
    if torch.compiler.is_compiling():
        return _make_weights(grad_output, kept, kernel)
    shape, like = tuple(grad_output.shape), (grad_output.device, grad_output.dtype)
    key = (shape, like, kept.rule.scale, *kept[2:5], kernel)
    known = _KNOWN.get(key)
    if known is not None:
        return known
    made = _make_weights(grad_output, kept, kernel)
    if type(made[0]) is Tensor and not made[0].is_inference():
        remember(_KNOWN, key, made, MOST_KNOWN)
    return made


def _make_weights(
    grad_output: Tensor, kept: KeptPositions, kernel: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    batch, _, height, width = grad_output.shape
    exact = torch.promote_types(grad_output.dtype, torch.float32)
    like = grad_output.new_empty(0, dtype=exact)
    axes = zip((height, width), kept.input_size, kernel, *kept.geometry[:3], strict=True)
    rows, columns = (_inside(*axis, like=like) for axis in axes)
    of_rows, of_columns = [rows[:, None].expand(-1, batch, -1)], [columns]
    for lattice in kept.lattices:
        chosen, across = like.new_zeros(batch, height), like.new_zeros(width)
        lattice.samples(chosen)[:, lattice.row :: lattice.row_step] = (
            -kept.rule.scale * lattice.weight
        )
        across[lattice.column :: lattice.column_step] = 1
        if lattice.column_step == 1:  # the same columns as the sum over all
            of_rows[0] = of_rows[0] + rows[:, None] * chosen
        else:
            of_rows.append(rows[:, None] * chosen)
            of_columns.append(columns * across)
    taps = torch.stack(of_rows).flatten(2).flatten(0, 1)
    return taps.to(grad_output.dtype), torch.stack(of_columns)


def _inside(
    size: int, input_size: int, taps: int, stride: int, padding: int, dilation: int, *, like: Tensor
) -> Tensor:
    """1 where a tap of an output position lies inside the image, along one axis: (taps, size)."""
    positions = torch.arange(size, device=like.device) * stride - padding
    places = positions + torch.arange(taps, device=like.device)[:, None] * dilation
    return ((places >= 0) & (places < input_size)).to(like.dtype)
