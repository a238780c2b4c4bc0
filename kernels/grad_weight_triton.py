"""Triton: the weight gradient of a strided convolution, grad_output summed while it is loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_sums_triton import kept_sum
from .select_triton import INTERPRETED, rounded


@triton.jit
def _grad_weight_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    height,
    width,
    x_height,
    x_width,
    positions,
    length,
    first_slice,
    slice_size,
    outputs,
    channels,
    kernel_width,
    grad_sample,
    grad_channel,
    grad_row,
    grad_column,
    x_sample,
    x_channel,
    x_row,
    x_column,
    out_output,
    out_channel,
    out_row,
    out_column,
    row,
    row_step,
    column,
    column_step,
    window_row,
    window_row_step,
    window_column,
    window_column_step,
    dilation_row,
    dilation_column,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_HEIGHT: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CUT_HEIGHT: tl.constexpr,
    CUT_WIDTH: tl.constexpr,
    FLAT_SHIFT: tl.constexpr,
    LAST: tl.constexpr,
    INDEX: tl.constexpr,
    UNSIGNED: tl.constexpr,
    ONE_TAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """out[slice, m, tap, c] = sum over k of kept_sum(grad)[k, m] * x[window of k at tap, c].

    k counts the kept positions (sample, i, j) of a lattice of ROWS x COLUMNS; a slice takes
    ``length`` of them. m counts the output and c the input channels of a group; their tiles of M
    and N (along tap, c) are program axis 0, slices axis 1, groups axis 2. ONE_TAP: a tile of N lies
    within one tap.
    """
    tiles = tl.cdiv(outputs, M)
    m = tl.program_id(0) % tiles * M + tl.arange(0, M)[None, :]
    first = tl.program_id(0) // tiles * N
    if ONE_TAP:
        tap = first // channels
        c = first - tap * channels + tl.arange(0, N)[None, :]
        filled = c < channels
    else:
        n = first + tl.arange(0, N)[None, :]
        tap = n // channels
        c = n % channels
        filled = n < TAPS * channels
    r = tap // kernel_width
    s = tap % kernel_width
    group = tl.program_id(2).to(INDEX)
    grad_ptr += (group * outputs + m) * grad_channel
    top = window_row + r * dilation_row
    left = window_column + s * dilation_column
    x_ptr += (group * channels + c) * x_channel + top.to(INDEX) * x_row + left * x_column

    begin = tl.program_id(1).to(INDEX) * length
    end = tl.minimum(begin + length, positions)
    total = tl.zeros((M, N), tl.float32)
    for at in range(begin, end, K):
        # Unsigned: division by a constant is one product, and below 0 is beyond the edge.
        k = (at + tl.arange(0, K)[:, None]).to(UNSIGNED)
        sample = k // (ROWS * COLUMNS)
        k -= sample * (ROWS * COLUMNS)
        i = (k // COLUMNS).to(INDEX)
        j = (k % COLUMNS).to(INDEX)
        sample = sample.to(INDEX)
        counted = at + tl.arange(0, K)[:, None] < end
        summed = kept_sum(
            grad_ptr,
            sample * grad_sample,
            i,
            j,
            counted & (m < outputs),
            height,
            width,
            grad_row,
            grad_column,
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
        summed = rounded(summed, grad_ptr.dtype.element_ty)
        down = i * window_row_step
        right = j * window_column_step
        y = (top + down).to(UNSIGNED)
        x = (left + right).to(UNSIGNED)
        valid = counted & (y < tl.cast(x_height, UNSIGNED)) & filled
        valid = valid & (x < tl.cast(x_width, UNSIGNED))
        place = sample * x_sample + down * x_row + right * x_column
        seen = tl.load(x_ptr + place, mask=valid, other=0.0)
        if INTERPRETED:  # whose products of bfloat16 are those of their bits
            summed = summed.to(tl.float32)
            seen = seen.to(tl.float32)
        total = tl.dot(tl.trans(summed), seen, total, input_precision="ieee")

    m = tl.program_id(0) % tiles * M + tl.arange(0, M)[:, None]
    out_ptr += (first_slice + tl.program_id(1)).to(tl.int64) * slice_size
    at = (group * outputs + m) * out_output + c * out_channel + r * out_row + s * out_column
    result = rounded(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=(m < outputs) & filled)


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, parts, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[e] = sum over p of parts[p, e], always in the same order."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        inside = (part < parts) & (element < size)
        place = parts_ptr + part.to(tl.int64) * size + element
        total += tl.load(place, mask=inside, other=0.0)
    result = rounded(tl.sum(total, 0, keep_dims=True), out_ptr.dtype.element_ty)
    tl.store(out_ptr + element, result, mask=element < size)
