"""Triton: S(W), S(Wᵀ) and masks of many weights in one launch.

A table describes the weights (`prune_weight`): how far each tensor lies from the first of its kind,
and sizes; a second one says which tile of which weight a program handles. Tables hold int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .prune_triton import choose, load_runs, store_runs, tile_of_runs
from .select_triton import join, keep_largest, magnitude, rounded, split, times

TABLE_COLUMNS = tl.constexpr(11)


@triton.jit
def _place(first, row, column: tl.constexpr, ALIGN: tl.constexpr):
    """Address of a tensor; distances are in units of ALIGN elements."""
    return first + tl.load(row + column) * ALIGN


@triton.jit
def _integer(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.int32)


@triton.jit
def _room(row_inside, flat, channels, channel_room, FLAT: tl.constexpr):
    """Return the part of a row that `_load_row` and `_store_row` may touch: a mask or a count."""
    if FLAT:
        return row_inside & (flat < channels)
    else:
        return tl.where(row_inside, channel_room, 0)


@triton.jit
def _load_row(
    pointer, offset, step, room, M: tl.constexpr, LOG: tl.constexpr, SHAPE: tl.constexpr, FLAT
):
    if FLAT:
        return split(tl.load(pointer + offset, mask=room, other=0.0), SHAPE[0], SHAPE[1], LOG)
    else:
        elements = ()
        for b in tl.static_range(M):
            elements = elements + (tl.load(pointer + offset + b * step, mask=b < room, other=0.0),)
        return elements


@triton.jit
def _store_row(
    pointer,
    values,
    offset,
    step,
    room,
    M: tl.constexpr,
    LOG: tl.constexpr,
    SHAPE: tl.constexpr,
    FLAT,
):
    if FLAT:
        tl.store(pointer + offset, join(values, SHAPE[0], SHAPE[1], LOG), mask=room)
    else:
        for b in tl.static_range(M):
            tl.store(pointer + offset + b * step, values[b], mask=b < room)


@triton.jit
def _pair_kernel(
    first_weight,
    first_output,
    first_grad_input,
    first_mask,
    table_ptr,
    tiles_ptr,
    N_OUTPUT: tl.constexpr,
    N_GRAD_INPUT: tl.constexpr,
    M: tl.constexpr,
    NETWORK: tl.constexpr,
    WEIGHT: tl.constexpr,
    RESULT: tl.constexpr,
    MASK: tl.constexpr,
    WRITE: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Blocks of M output channels x M input channels, both directions from one read.

    FLAT: input channels are contiguous and divisible by M; rows are then (output channels, tap)
    and columns input channels. Else rows are output channels and columns (input channels, tap).
    N_OUTPUT, N_GRAD_INPUT: 0 where S(W) or S(Wᵀ) is not wanted.
    """
    SHAPE: tl.constexpr = (ROWS, COLUMNS)
    tile = tiles_ptr + 2 * tl.program_id(0)
    row = table_ptr + tl.load(tile) * TABLE_COLUMNS
    local = tl.load(tile + 1).to(tl.int32)
    outputs = _integer(row, 4)
    channels = _integer(row, 5) * ALIGN
    taps = _integer(row, 6)
    per_part = _integer(row, 7)
    output_step = _integer(row, 8) * ALIGN
    channel_step = 1 if FLAT else _integer(row, 9)
    tap_step = _integer(row, 10) * ALIGN

    blocks = (channels + M - 1) // M
    across = blocks if FLAT else blocks * taps
    column_tiles = (across + COLUMNS - 1) // COLUMNS
    at_row = (local // column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    first_column = (local % column_tiles) * COLUMNS
    at_column = first_column + tl.arange(0, COLUMNS)[None, :]
    if FLAT:
        block, tap = at_row // taps, at_row % taps
        channel = at_column * M
    else:
        block, tap = at_row, at_column % taps
        channel = at_column // taps * M
    parts = (per_part + M - 1) // M
    part = block // parts
    start = (block - part * parts) * M
    output = part * per_part + start
    output_room = tl.where(output < outputs, per_part - start, 0)
    output_room = tl.where(part * per_part < outputs, output_room, 0)
    channel_room = channels - channel
    if FLAT:
        flat = first_column * M + tl.arange(0, COLUMNS * M)[None, :]
        offset = output * output_step + tap * tap_step + flat
    else:
        flat = at_column
        offset = output * output_step + tap * tap_step + channel * channel_step

    weight_ptr = _place(first_weight, row, 0, ALIGN)
    rows = ()
    for a in tl.static_range(M):
        room = _room(a < output_room, flat, channels, channel_room, FLAT)
        at = offset + a * output_step
        rows = rows + _load_row(weight_ptr, at, channel_step, room, M, LOG, SHAPE, FLAT)
    values = ()
    for i in tl.static_range(M * M):
        valid = (i // M < output_room) & (i % M < channel_room)
        values = values + (tl.where(valid, magnitude(rows[i]), -1),)

    for a in tl.static_range(M):
        room = _room(a < output_room, flat, channels, channel_room, FLAT)
        at = offset + a * output_step
        if N_OUTPUT > 0:
            group = ()
            for b in tl.static_range(M):
                group = group + (values[a * M + b],)
            kept = keep_largest(group, WEIGHT == tl.float32, N_OUTPUT, M, NETWORK)
            result = ()
            masks = ()
            for b in tl.static_range(M):
                result = result + (times(rounded(rows[a * M + b], RESULT), kept[b]),)
                masks = masks + (kept[b].to(tl.uint8),)
            if WRITE:
                out_ptr = _place(first_output, row, 1, ALIGN)
                _store_row(out_ptr, result, at, channel_step, room, M, LOG, SHAPE, FLAT)
            if MASK:
                mask_ptr = _place(first_mask, row, 3, ALIGN)
                _store_row(mask_ptr, masks, at, channel_step, room, M, LOG, SHAPE, FLAT)
    if N_GRAD_INPUT > 0:
        kept_rows = ()
        for b in tl.static_range(M):
            group = ()
            for a in tl.static_range(M):
                group = group + (values[a * M + b],)
            kept_rows = kept_rows + keep_largest(
                group, WEIGHT == tl.float32, N_GRAD_INPUT, M, NETWORK
            )
        grad_input_ptr = _place(first_grad_input, row, 2, ALIGN)
        for a in tl.static_range(M):
            room = _room(a < output_room, flat, channels, channel_room, FLAT)
            result = ()
            for b in tl.static_range(M):
                cast = rounded(rows[a * M + b], RESULT)
                result = result + (times(cast, kept_rows[b * M + a]),)
            at = offset + a * output_step
            _store_row(grad_input_ptr, result, at, channel_step, room, M, LOG, SHAPE, FLAT)


@triton.jit
def _run_kernel(
    first_weight,
    first_output,
    first_mask,
    table_ptr,
    tiles_ptr,
    N: tl.constexpr,
    M: tl.constexpr,
    NETWORK: tl.constexpr,
    WEIGHT: tl.constexpr,
    RESULT: tl.constexpr,
    MASK: tl.constexpr,
    WRITE: tl.constexpr,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNEL_INNER: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One direction, any N:M: a weight as (samples, channels, positions), see `prune_triton`."""
    SHAPE: tl.constexpr = (M, LOG, ROWS, COLUMNS, FLAT)
    entry = tiles_ptr + 2 * tl.program_id(0)
    row = table_ptr + tl.load(entry) * TABLE_COLUMNS
    local = tl.load(entry + 1).to(tl.int32)
    channel_step = 1 if FLAT else _integer(row, 7)
    position_step = _integer(row, 8)
    position_tiles = _integer(row, 9)
    group_tiles = _integer(row, 10)
    if FLAT:
        position_step *= ALIGN
    sample = tl.load(row + 6) * (local // group_tiles // position_tiles)
    tile = tile_of_runs(
        local // group_tiles % position_tiles,
        local % group_tiles,
        _integer(row, 3),
        _integer(row, 4),
        _integer(row, 5),
        SHAPE,
        CHANNEL_INNER,
    )
    weight_ptr = _place(first_weight, row, 0, ALIGN) + sample
    weights = load_runs(weight_ptr, tile, channel_step, position_step, SHAPE)
    kept = choose(weights, tile[5], 0, 0, 0, N, M, 1, 1, NETWORK)
    if WRITE:
        results = ()
        for j in tl.static_range(M):
            results = results + (times(rounded(weights[j], RESULT), kept[j]),)
        output_ptr = _place(first_output, row, 1, ALIGN) + sample
        store_runs(output_ptr, results, tile, channel_step, position_step, SHAPE)
    if MASK:
        masks = ()
        for j in tl.static_range(M):
            masks = masks + (kept[j].to(tl.uint8),)
        mask_ptr = _place(first_mask, row, 2, ALIGN) + sample
        store_runs(mask_ptr, masks, tile, channel_step, position_step, SHAPE)
