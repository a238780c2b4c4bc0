"""Triton: N:M pruning along the channels of (N, C, positions), read once, written once.

Used for grad_output in grad_input (SDGP) and, through `prune_weight_triton`, for weights. A tile
is (positions x groups) where channels are contiguous in memory (channels_last) and
(groups x positions) where positions are (NCHW); either way a thread holds whole groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .select_triton import join, keep_largest, keep_random, magnitude, rounded, split, times


@triton.jit
def tile_places(
    tile_position,
    tile_group,
    positions,
    channels,
    per_part,
    ELEMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
):
    """Position, first channel and number of channels left of each run of ELEMENTS channels.

    ``per_part``: channels of a convolution group, in which groups of M start anew.
    """
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    if CHANNEL_INNER:
        position = tile_position * ROWS + rows
        run = tile_group * COLUMNS + columns
    else:
        position = tile_position * COLUMNS + columns
        run = tile_group * ROWS + rows
    runs_per_part = (per_part + ELEMENTS - 1) // ELEMENTS
    part = run // runs_per_part
    start = (run - part * runs_per_part) * ELEMENTS
    room = tl.where(part * per_part < channels, per_part - start, 0)
    # A tile whose positions are outside reads and writes nothing.
    room = tl.where(position < positions, room, 0)
    return position, run, part * per_part + start, room


@triton.jit
def _flat_channels(
    tile_position,
    tile_group,
    positions,
    channels,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tile_position * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tile_group * WIDTH + tl.arange(0, WIDTH)[None, :]
    return position, channel, (position < positions) & (channel < channels)


@triton.jit
def load_runs(
    x_ptr,
    tile_position,
    tile_group,
    position,
    channel,
    room,
    positions,
    channels,
    x_channel,
    x_position,
    ELEMENTS: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """ELEMENTS tensors (ROWS, COLUMNS): the channels of each run.

    FLAT: channels are contiguous and full runs follow each other, so that they can be loaded as
    vectors and taken apart in registers.
    """
    if FLAT:
        at, c, valid = _flat_channels(
            tile_position, tile_group, positions, channels, ROWS, COLUMNS * ELEMENTS
        )
        x = tl.load(x_ptr + at * x_position + c, mask=valid, other=0.0)
        return split(x, ROWS, COLUMNS, LOG)
    else:
        base = x_ptr + position * x_position + channel * x_channel
        elements = ()
        for j in tl.static_range(ELEMENTS):
            elements = elements + (tl.load(base + j * x_channel, mask=j < room, other=0.0),)
        return elements


@triton.jit
def store_runs(
    out_ptr,
    elements,
    tile_position,
    tile_group,
    position,
    channel,
    room,
    positions,
    channels,
    out_channel,
    out_position,
    ELEMENTS: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """The inverse of `load_runs`."""
    if FLAT:
        at, c, valid = _flat_channels(
            tile_position, tile_group, positions, channels, ROWS, COLUMNS * ELEMENTS
        )
        tl.store(out_ptr + at * out_position + c, join(elements, ROWS, COLUMNS, LOG), mask=valid)
    else:
        base = out_ptr + position * out_position + channel * out_channel
        for j in tl.static_range(ELEMENTS):
            tl.store(base + j * out_channel, elements[j], mask=j < room)


@triton.jit
def choose(
    elements,
    room,
    seed,
    position,
    first_call,
    N: tl.constexpr,
    M: tl.constexpr,
    RUN: tl.constexpr,
    RULE: tl.constexpr,
    NETWORK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Kept or not (int1) for RUN groups of M each."""
    kept = ()
    for group in tl.static_range(RUN):
        if RULE == 2:
            # Always 0; it makes the compiler keep the draws where the values are.
            anchor = magnitude(elements[0]) >> 31
            kept = kept + keep_random(
                seed, position + anchor, first_call, room - group * M + anchor, group, N, M, DIGITS
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
    scale_sample,
    position_tiles,
    ALIGN: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    RUN: tl.constexpr,
    RULE: tl.constexpr,
    SCALE: tl.constexpr,
    NETWORK: tl.constexpr,
    DIGITS: tl.constexpr,
    CALLS: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
    FLAT: tl.constexpr,
):
    E: tl.constexpr = RUN * M
    sample = (tl.program_id(0) // position_tiles).to(tl.int64)
    tile_position = tl.program_id(0) % position_tiles
    tile_group = tl.program_id(1)
    if not CHANNEL_INNER:  # strides come in units of ALIGN, so that vectors are seen to be aligned
        positions *= ALIGN
        x_channel *= ALIGN
        x_sample *= ALIGN
        out_channel *= ALIGN
        out_sample *= ALIGN
    position, run, channel, room = tile_places(
        tile_position, tile_group, positions, channels, per_part, E, ROWS, COLUMNS, CHANNEL_INNER
    )
    elements = load_runs(
        x_ptr + sample * x_sample,
        tile_position,
        tile_group,
        position,
        channel,
        room,
        positions,
        channels,
        x_channel,
        x_position,
        E,
        LOG,
        ROWS,
        COLUMNS,
        FLAT,
    )
    seed = tl.load(seed_ptr) if RULE == 2 else 0
    place = (sample * positions).to(tl.int32) + position
    kept = choose(elements, room, seed, place, run * CALLS, N, M, RUN, RULE, NETWORK, DIGITS)
    pruned = ()
    for j in tl.static_range(E):
        pruned = pruned + (times(elements[j], kept[j]),)
    if SCALE == 1:
        before = tl.zeros((ROWS, COLUMNS), tl.float32)
        after = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(E):
            before += tl.abs(elements[j].to(tl.float32))
            after += tl.abs(pruned[j].to(tl.float32))
        scale = rounded(ratio(before, after), pruned[0].dtype)
        scaled = ()
        for j in tl.static_range(E):
            scaled = scaled + (times(pruned[j], scale),)
        pruned = scaled
    elif SCALE == 2:
        scaled = ()
        for j in tl.static_range(E):
            at = scale_ptr + sample * scale_sample + channel + j
            scaled = scaled + (times(pruned[j], tl.load(at, mask=j < room, other=1.0)),)
        pruned = scaled
    store_runs(
        out_ptr + sample * out_sample,
        pruned,
        tile_position,
        tile_group,
        position,
        channel,
        room,
        positions,
        channels,
        out_channel,
        out_position,
        E,
        LOG,
        ROWS,
        COLUMNS,
        FLAT,
    )


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
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    tile_group = tl.program_id(1)
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
        tile_position = chunk * steps + step
        position, run, channel, room = tile_places(
            tile_position,
            tile_group,
            positions,
            channels,
            per_part,
            M,
            ROWS,
            COLUMNS,
            CHANNEL_INNER,
        )
        elements = load_runs(
            x_ptr + sample * x_sample,
            tile_position,
            tile_group,
            position,
            channel,
            room,
            positions,
            channels,
            x_channel,
            x_position,
            M,
            LOG,
            ROWS,
            COLUMNS,
            FLAT,
        )
        kept = choose(elements, room, 0, position, position, N, M, 1, 1, NETWORK, 1)
        more_before = ()
        more_after = ()
        for j in tl.static_range(M):
            pruned = times(elements[j], kept[j])
            more_before = more_before + (before[j] + tl.abs(elements[j].to(tl.float32)),)
            more_after = more_after + (after[j] + tl.abs(pruned.to(tl.float32)),)
        before = more_before
        after = more_after
    position, run, channel, room = tile_places(
        0, tile_group, 1, channels, per_part, M, ROWS, COLUMNS, CHANNEL_INNER
    )
    axis: tl.constexpr = 0 if CHANNEL_INNER else 1
    channel = tl.max(tl.where(room > 0, channel, 0), axis)
    room = tl.max(room, axis)
    row = sums_ptr + tl.program_id(0).to(tl.int64) * 2 * channels
    for j in tl.static_range(M):
        tl.store(row + channel + j, tl.sum(before[j], axis), mask=j < room)
        tl.store(row + channels + channel + j, tl.sum(after[j], axis), mask=j < room)


@triton.jit
def _scale_kernel(sums_ptr, scale_ptr, channels, rows, BLOCK: tl.constexpr):
    """scale[sample, channel] from the sums of all chunks of a sample, added in a fixed order."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.float32)
    after = tl.zeros((BLOCK,), tl.float32)
    at = sums_ptr + tl.program_id(0).to(tl.int64) * rows * 2 * channels + channel
    for _row in range(rows):
        before += tl.load(at, mask=channel < channels, other=0.0)
        after += tl.load(at + channels, mask=channel < channels, other=0.0)
        at += 2 * channels
    scale = rounded(ratio(before, after), scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + tl.program_id(0) * channels + channel, scale, mask=channel < channels)
