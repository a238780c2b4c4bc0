"""Host side of the Triton kernels that sum pairs of grad_output for the alternating grad_weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from .launch import LANES, Launch, within_32_bits
from .pair_sums_triton import _kept_sums_kernel, _pair_sum_kernel

Lattice = tuple[int, int, int, int]


def sum_into(
    grad_output: Tensor,
    results: Sequence[Tensor],
    block: tuple[int, int],
    lattices: Sequence[Lattice],
) -> None:
    """`fst.ops.positions.sum_grad_output` with information restoration.

    Args:
        grad_output: (N, C, P, Q) in float16, bfloat16 or float32, any strides.
        results: (N, C, rows, columns) of each lattice, written over.
        block: (height, width) of the block of which one position is kept.
        lattices: (row, row step, column, column step) of the kept positions. A row step above the
            block's height means pairs along the flattened map.

    Raises:
        ValueError: see `launch.within_32_bits`.
    """
    grad_output = within_32_bits(grad_output)
    for lattice, out in zip(lattices, results, strict=True):
        if out.numel():
            sum_launch(grad_output, out, block, lattice).run()


def is_flat(block: tuple[int, int], lattice: Lattice) -> bool:
    """Whether pairs run along the flattened map."""
    return lattice[1] > block[0]


def kept_sum_constants(
    size: tuple[int, int], block: tuple[int, int], lattice: Lattice, restore: bool = True
) -> dict[str, Any]:
    """What `kept_sum` adds up on a map of this size; without ``restore`` nothing."""
    height, width = size
    flat = is_flat(block, lattice)
    # Along the flattened map the kept place of a pair alternates from row to row.
    phase = lattice[2] ^ (lattice[0] if flat else 0)
    odd = phase == 1 and (height * width if flat else width) % 2
    blocks = (0, 0) if flat or not restore else block
    return {
        "BLOCK_HEIGHT": blocks[0],
        "BLOCK_WIDTH": blocks[1],
        "CUT_HEIGHT": height % block[0] > 0,
        "CUT_WIDTH": width % block[1] > 0,
        "FLAT_SHIFT": 0 if not flat or not restore else 1 if phase == 0 else -1,
        "LAST": bool(restore and odd and height * width > 1 and (flat or width > 1)),
    }


def sum_launch(
    grad_output: Tensor, out: Tensor, block: tuple[int, int], lattice: Lattice
) -> Launch:
    """How `sum_into` runs for one lattice."""
    height, width = grad_output.shape[2:]
    row_pairs = block == (1, 2) and not is_flat(block, lattice) and width % 2 == 0
    if row_pairs and grad_output.is_contiguous() and out.is_contiguous():
        tile = 4 * LANES
        grid = (triton.cdiv(out.numel(), tile),)
        values = 2 * out.numel()
        return Launch(_pair_sum_kernel, grid, (grad_output, out, values), {"BLOCK": tile})
    samples, channels, out_height, out_width = out.shape
    positions = out_height * out_width
    if out.stride(1) == 1 and channels > 1:
        across = min(triton.next_power_of_2(channels), 64)
        down = 8 * LANES // across
    else:
        across = 1
        down = min(triton.next_power_of_2(positions), 4 * LANES)
        across = min(triton.next_power_of_2(channels), 4 * LANES // down)
    constants = {
        **kept_sum_constants((height, width), block, lattice),
        "POSITIONS": down,
        "CHANNELS": across,
    }
    arguments = (
        grad_output,
        out,
        height,
        width,
        out_height,
        out_width,
        channels,
        *grad_output.stride(),
        *out.stride(),
        *lattice,
        triton.cdiv(positions, down),
    )
    # Axis 0 alone may have more than 65,535 programs.
    grid = (samples * triton.cdiv(positions, down), triton.cdiv(channels, across))
    return Launch(_kept_sums_kernel, grid, arguments, constants)
