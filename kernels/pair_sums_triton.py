"""Triton: pair and block sums of grad_output for FST's half-cost grad_weight, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .select_triton import rounded


@triton.jit
def kept_sum(
    x_ptr,
    start,
    i,
    j,
    inside,
    height,
    width,
    x_row,
    x_column,
    row,
    row_step,
    column,
    column_step,
    BLOCK_HEIGHT: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CUT_HEIGHT: tl.constexpr,
    CUT_WIDTH: tl.constexpr,
    FLAT_SHIFT: tl.constexpr,
    LAST: tl.constexpr,
):
    """The kept position (row + i * row_step, column + j * column_step) of the map at x_ptr + start,
    in float32, and what is added to it.

    BLOCK_HEIGHT > 0: the BLOCK_HEIGHT x BLOCK_WIDTH block that contains it is added up (CUT_HEIGHT,
    CUT_WIDTH: the last may be cut off at the map's edge; with LAST, the last block takes the odd
    last column as well). FLAT_SHIFT 1 or -1: the next or the previous position of the flattened map
    is added (with LAST, the last but one takes the last one as well). Neither: it stands alone.
    """
    if BLOCK_HEIGHT > 0:
        top = i * BLOCK_HEIGHT
        left = j * BLOCK_WIDTH
        for k in tl.static_range(BLOCK_HEIGHT * BLOCK_WIDTH):
            p = top + k // BLOCK_WIDTH
            q = left + k % BLOCK_WIDTH
            valid = inside
            if CUT_HEIGHT and k >= BLOCK_WIDTH:
                valid = valid & (p < height)
            if CUT_WIDTH and k % BLOCK_WIDTH > 0:
                valid = valid & (q < width)
            at = start + p * x_row + q * x_column
            value = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
            if k == 0:
                total = value
            else:
                total += value
        if LAST:
            valid = inside & (left + BLOCK_WIDTH == width - 1)
            at = start + top * x_row + (width - 1) * x_column
            total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    else:
        p = row + i * row_step
        q = column + j * column_step
        at = start + p * x_row + q * x_column
        total = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        flat = p * width + q
        if FLAT_SHIFT != 0:
            partner = flat + FLAT_SHIFT
            valid = inside & (partner < height * width)
            at = start + partner // width * x_row + partner % width * x_column
            total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if LAST:
            valid = inside & (flat == height * width - 2)
            at = start + (height - 1) * x_row + (width - 1) * x_column
            total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def _kept_sums_kernel(
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
    position_tiles,
    BLOCK_HEIGHT: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CUT_HEIGHT: tl.constexpr,
    CUT_WIDTH: tl.constexpr,
    FLAT_SHIFT: tl.constexpr,
    LAST: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out[i, j] is `kept_sum` of the kept position (i, j)."""
    tile = tl.program_id(0) % position_tiles
    position = tile * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    sample = (tl.program_id(0) // position_tiles).to(tl.int64)
    i = position // out_width
    j = position % out_width
    inside = (position < out_height * out_width) & (channel < channels)
    total = kept_sum(
        x_ptr + sample * x_sample + channel * x_channel,
        0,
        i,
        j,
        inside,
        height,
        width,
        x_row,
        x_column,
        row,
        row_step,
        column,
        column_step,
        BLOCK_HEIGHT,
        BLOCK_WIDTH,
        CUT_HEIGHT,
        CUT_WIDTH,
        FLAT_SHIFT,
        LAST,
    )
    out_ptr += sample * out_sample + channel * out_channel
    result = rounded(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + i * out_row + j * out_column, result, mask=inside)


@triton.jit
def _pair_sum_kernel(x_ptr, out_ptr, values, BLOCK: tl.constexpr):
    """out[k] = x[2k] + x[2k + 1]: rows of even width whose positions follow each other.

    ``values``: how many x has.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK
    both = at * 2 + tl.arange(0, 2 * BLOCK)
    pairs = tl.reshape(tl.load(x_ptr + both, mask=both < values, other=0.0), (BLOCK, 2))
    even, odd = tl.split(pairs)
    total = rounded(even.to(tl.float32) + odd.to(tl.float32), out_ptr.dtype.element_ty)
    place = at + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, total, mask=place < values // 2)
