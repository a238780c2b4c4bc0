"""Triton: N:M pruning along the channels of (N, C, positions), read once, written once.

Used for grad_output in grad_input (SDGP) and, through `prune_weight_triton`, for weights. A tile
is (positions x groups) where channels are contiguous in memory (channels_last) and
(groups x positions) where positions are (NCHW); either way a thread holds whole groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .select_triton import join, keep_largest, keep_random, magnitude, split, times


@triton.jit
def tile_of_runs(
    tile_position,
    tile_group,
    positions,
    channels,
    per_part,
    SHAPE: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
):
    """Return place and extent of each run of channels, for `load_runs` and `store_runs`.

    Args:
        per_part: channels of a convolution group, in which groups of M start anew.
        SHAPE: (channels of a run, its log2, rows, columns, FLAT).

    Returns:
        Numbers of the tile, then for each run its position, number, first channel and how many of
        its channels there are (0 outside), then the sizes.
    """
    ELEMENTS: tl.constexpr = SHAPE[0]
    rows = tl.arange(0, SHAPE[2])[:, None]
    columns = tl.arange(0, SHAPE[3])[None, :]
    if CHANNEL_INNER:
        position = tile_position * SHAPE[2] + rows
        run = tile_group * SHAPE[3] + columns
    else:
        position = tile_position * SHAPE[3] + columns
        run = tile_group * SHAPE[2] + rows
    runs_per_part = (per_part + ELEMENTS - 1) // ELEMENTS
    part = run // runs_per_part
    start = (run - part * runs_per_part) * ELEMENTS
    room = tl.where(part * per_part < channels, per_part - start, 0)
    room = tl.where(position < positions, room, 0)
    channel = part * per_part + start
    return tile_position, tile_group, position, run, channel, room, positions, channels


@triton.jit
def _vectors(tile, position_step, SHAPE: tl.constexpr):
    """Offsets and mask of a FLAT tile, in which runs of contiguous channels follow each other."""
    WIDTH: tl.constexpr = SHAPE[3] * SHAPE[0]
    position = tile[0] * SHAPE[2] + tl.arange(0, SHAPE[2])[:, None]
    channel = tile[1] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (position < tile[6]) & (channel < tile[7])
    return position * position_step + channel, inside


@triton.jit
def load_runs(x_ptr, tile, channel_step, position_step, SHAPE: tl.constexpr):
    """A tensor (rows, columns) for each channel of a run.

    FLAT: channels are contiguous and full runs follow each other, so that they are loaded as
    vectors and taken apart in registers.
    """
    if SHAPE[4]:
        offsets, inside = _vectors(tile, position_step, SHAPE)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        return split(x, SHAPE[2], SHAPE[3], SHAPE[1])
    else:
        base = x_ptr + tile[2] * position_step + tile[4] * channel_step
        elements = ()
        for j in tl.static_range(SHAPE[0]):
            elements = elements + (tl.load(base + j * channel_step, mask=j < tile[5], other=0.0),)
        return elements


@triton.jit
def store_runs(out_ptr, elements, tile, channel_step, position_step, SHAPE: tl.constexpr):
    """The inverse of `load_runs`."""
    if SHAPE[4]:
        offsets, inside = _vectors(tile, position_step, SHAPE)
        joined = join(elements, SHAPE[2], SHAPE[3], SHAPE[1])
        tl.store(out_ptr + offsets, joined, mask=inside)
    else:
        base = out_ptr + tile[2] * position_step + tile[4] * channel_step
        for j in tl.static_range(SHAPE[0]):
            tl.store(base + j * channel_step, elements[j], mask=j < tile[5])


@triton.jit
def choose(
    elements,
    room,
    seed,
    position,
    call,
    N: tl.constexpr,
    M: tl.constexpr,
    RUN: tl.constexpr,
    RULE: tl.constexpr,
    NETWORK: tl.constexpr,
):
    """Kept or not (int1) for RUN groups of M each."""
    kept = ()
    for group in tl.static_range(RUN):
        if RULE == 2:
            # Always 0; it makes the compiler keep the draws where the values are.
            anchor = magnitude(elements[0]) >> 31
            kept = kept + keep_random(
                seed, position + anchor, call, room - group * M + anchor, group, N, M
            )
        else:
            values = ()
            for j in tl.static_range(M):
                x = elements[group * M + j]
                values = values + (tl.where(group * M + j < room, magnitude(x), -1),)
            kept = kept + keep_largest(values, elements[0].dtype == tl.float32, N, M, NETWORK)
    return kept


@triton.jit
def _prune_kernel(
    x_ptr,
    out_ptr,
    seed_ptr,
    scale_ptr,
    positions,
    channels,
    per_part,
    x_sample,
    x_channel,
    x_position,
    out_sample,
    out_channel,
    out_position,
    position_tiles,
    ALIGN: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    RUN: tl.constexpr,
    RULE: tl.constexpr,
    SCALE: tl.constexpr,
    NETWORK: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
    FLAT: tl.constexpr,
):
    E: tl.constexpr = RUN * M
    SHAPE: tl.constexpr = (RUN * M, LOG, ROWS, COLUMNS, FLAT)
    sample = (tl.program_id(0) // position_tiles).to(tl.int64)
    if not CHANNEL_INNER:  # strides come in units of ALIGN, so that vectors are seen to be aligned
        positions *= ALIGN
        x_channel *= ALIGN
        x_sample *= ALIGN
        out_channel *= ALIGN
        out_sample *= ALIGN
    tile = tile_of_runs(
        tl.program_id(0) % position_tiles,
        tl.program_id(1),
        positions,
        channels,
        per_part,
        SHAPE,
        CHANNEL_INNER,
    )
    position, run, channel, room = tile[2], tile[3], tile[4], tile[5]
    elements = load_runs(x_ptr + sample * x_sample, tile, x_channel, x_position, SHAPE)
    seed = tl.load(seed_ptr) if RULE == 2 else 0
    place = (sample * positions).to(tl.int32) + position
    kept = choose(elements, room, seed, place, run, N, M, RUN, RULE, NETWORK)
    pruned = ()
    for j in tl.static_range(E):
        pruned = pruned + (times(elements[j], kept[j]),)
    if SCALE == 1:
        before = tl.zeros((ROWS, COLUMNS), tl.float32)
        after = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(E):
            before += tl.abs(elements[j].to(tl.float32))
            after += tl.abs(pruned[j].to(tl.float32))
        scale = ratio(before, after)
        scaled = ()
        for j in tl.static_range(E):
            scaled = scaled + (times(pruned[j], scale),)
        pruned = scaled
    elif SCALE == 2:
        scaled = ()
        for j in tl.static_range(E):
            at = scale_ptr + sample * channels + channel + j
            scaled = scaled + (times(pruned[j], tl.load(at, mask=j < room, other=1.0)),)
        pruned = scaled
    store_runs(out_ptr + sample * out_sample, pruned, tile, out_channel, out_position, SHAPE)


@triton.jit
def ratio(before, after):
    """before / after in float32, 1 where nothing was kept."""
    return tl.where(after > 0, tl.div_rn(before, tl.where(after > 0, after, 1.0)), 1.0)


@triton.jit
def _sums_kernel(
    x_ptr,
    sums_ptr,
    positions,
    channels,
    per_part,
    x_sample,
    x_channel,
    x_position,
    chunks,
    steps,
    ALIGN: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    NETWORK: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
    FLAT: tl.constexpr,
):
    """sums[sample, chunk, 0 and 1, channel]: sums of |x| and of |pruned x| over a chunk."""
    SHAPE: tl.constexpr = (M, LOG, ROWS, COLUMNS, FLAT)
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    if not CHANNEL_INNER:
        positions *= ALIGN
        x_channel *= ALIGN
        x_sample *= ALIGN
    zero = tl.zeros((ROWS, COLUMNS), tl.float32)
    before = ()
    after = ()
    for _j in tl.static_range(M):
        before = before + (zero,)
        after = after + (zero,)
    for step in range(steps):
        tile = tile_of_runs(
            tl.program_id(0) % chunks * steps + step,
            tl.program_id(1),
            positions,
            channels,
            per_part,
            SHAPE,
            CHANNEL_INNER,
        )
        elements = load_runs(x_ptr + sample * x_sample, tile, x_channel, x_position, SHAPE)
        kept = choose(elements, tile[5], 0, 0, 0, N, M, 1, 1, NETWORK)
        more_before = ()
        more_after = ()
        for j in tl.static_range(M):
            pruned = times(elements[j], kept[j])
            more_before = more_before + (before[j] + tl.abs(elements[j].to(tl.float32)),)
            more_after = more_after + (after[j] + tl.abs(pruned.to(tl.float32)),)
        before = more_before
        after = more_after
    tile = tile_of_runs(0, tl.program_id(1), 1, channels, per_part, SHAPE, CHANNEL_INNER)
    channel, room = tile[4], tile[5]
    axis: tl.constexpr = 0 if CHANNEL_INNER else 1
    channel = tl.max(tl.where(room > 0, channel, 0), axis)
    room = tl.max(room, axis)
    row = sums_ptr + tl.program_id(0).to(tl.int64) * 2 * channels
    for j in tl.static_range(M):
        tl.store(row + channel + j, tl.sum(before[j], axis), mask=j < room)
        tl.store(row + channels + channel + j, tl.sum(after[j], axis), mask=j < room)


@triton.jit
def _scale_kernel(sums_ptr, scale_ptr, channels, chunks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """scale[sample, channel] from the sums of all chunks of a sample, added in a fixed order."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    before = tl.zeros((ROWS, BLOCK), tl.float32)
    after = tl.zeros((ROWS, BLOCK), tl.float32)
    sums_ptr += tl.program_id(0).to(tl.int64) * chunks * 2 * channels + channel
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)[:, None]
        inside = (chunk < chunks) & (channel < channels)
        at = sums_ptr + chunk * 2 * channels
        before += tl.load(at, mask=inside, other=0.0)
        after += tl.load(at + channels, mask=inside, other=0.0)
    scale = ratio(tl.sum(before, 0, keep_dims=True), tl.sum(after, 0, keep_dims=True))
    place = scale_ptr + tl.program_id(0).to(tl.int64) * channels + channel
    tl.store(place, scale, mask=channel < channels)
