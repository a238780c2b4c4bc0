"""Triton: pair and block sums of grad_output for FST's half-cost grad_weight, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .select_triton import rounded


@triton.jit
def _fold_kernel(
    x_ptr,
    out_ptr,
    height,
    width,
    out_height,
    out_width,
    channels,
    x_sample,
    x_channel,
    x_row,
    x_column,
    out_sample,
    out_channel,
    out_row,
    out_column,
    row,
    row_step,
    column,
    column_step,
    block_height,
    block_width,
    FLAT_SHIFT: tl.constexpr,
    LAST: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out[i, j] is the sum of a kept position and of those that are folded into it.

    Kept are (row + i * row_step, column + j * column_step). FLAT_SHIFT 0: the block_height x
    block_width block that contains it is added up (cut off at the map's edge; with LAST, the last
    block takes the odd last column as well). FLAT_SHIFT 1 or -1: the next or the previous position
    of the flattened map is added (with LAST, the last but one takes the last one as well).
    """
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    sample = tl.program_id(2).to(tl.int64)
    i = position // out_width
    j = position % out_width
    inside = (position < out_height * out_width) & (channel < channels)
    x_ptr += sample * x_sample + channel * x_channel
    total = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    if FLAT_SHIFT == 0:
        top = i * block_height
        left = j * block_width
        for k in range(block_height * block_width):
            p = top + k // block_width
            q = left + k % block_width
            valid = inside & (p < height) & (q < width)
            value = tl.load(x_ptr + p * x_row + q * x_column, mask=valid, other=0.0)
            total += value.to(tl.float32)
        if LAST:
            valid = inside & (j == out_width - 1)
            at = top * x_row + (width - 1) * x_column
            total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    else:
        p = row + i * row_step
        q = column + j * column_step
        flat = p * width + q
        total += tl.load(x_ptr + p * x_row + q * x_column, mask=inside, other=0.0).to(tl.float32)
        partner = flat + FLAT_SHIFT
        valid = inside & (partner < height * width)
        at = partner // width * x_row + partner % width * x_column
        total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if LAST:
            valid = inside & (flat == height * width - 2)
            at = (height - 1) * x_row + (width - 1) * x_column
            total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    out_ptr += sample * out_sample + channel * out_channel
    result = rounded(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + i * out_row + j * out_column, result, mask=inside)


@triton.jit
def _pair_sum_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out[k] = x[2k] + x[2k + 1]: rows of even width whose positions follow each other."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    both = at * 2 + tl.arange(0, 2 * BLOCK)
    pairs = tl.reshape(tl.load(x_ptr + both, mask=both < 2 * size, other=0.0), (BLOCK, 2))
    even, odd = tl.split(pairs)
    total = rounded(even.to(tl.float32) + odd.to(tl.float32), out_ptr.dtype.element_ty)
    place = at + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, total, mask=place < size)
