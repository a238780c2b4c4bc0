"""Host side of the Triton kernels that fold grad_output for the alternating grad_weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from .fold_triton import _fold_kernel, _pair_sum_kernel
from .launch import DTYPES, LANES, Launch

Lattice = tuple[int, int, int, int]


def fold(
    grad_output: Tensor, block: tuple[int, int], phase: int, lattices: Sequence[Lattice]
) -> list[Tensor]:
    """`fst.ops.alternating.fold_grad_output` with information restoration.

    Args:
        grad_output: (N, C, P, Q) in float16, bfloat16 or float32, any strides.
        block: (height, width) of the block of which one position is kept.
        phase: which position of a flattened pair is kept; used with two lattices or an odd width.
        lattices: (row, row step, column, column step) of the kept positions. Two of them, or one
            with a row step of 2 and a block of height 1, mean pairs along the flattened map.

    Returns:
        One tensor (N, C, rows, columns) for each lattice, in the memory format of grad_output.
    """
    if grad_output.dtype not in DTYPES:
        raise TypeError(f"grad_output has dtype {grad_output.dtype}; allowed: {DTYPES}.")
    results = []
    for lattice in lattices:
        out = empty_result(grad_output, block, lattice)
        if out.numel():
            fold_launch(grad_output, out, block, phase, lattice).run()
        results.append(out)
    return results


def is_flat(block: tuple[int, int], lattice: Lattice) -> bool:
    """Whether pairs run along the flattened map."""
    return lattice[1] > block[0]


def empty_result(grad_output: Tensor, block: tuple[int, int], lattice: Lattice) -> Tensor:
    """Uninitialised memory for one lattice's result."""
    samples, channels, height, width = grad_output.shape
    row, row_step, column, column_step = lattice
    if not is_flat(block, lattice):
        row = 0
    shape = (
        samples,
        channels,
        (height - row + row_step - 1) // row_step,
        (width - column + column_step - 1) // column_step,
    )
    channels_last = grad_output.is_contiguous(memory_format=torch.channels_last)
    inner = channels_last and not grad_output.is_contiguous()
    memory_format = torch.channels_last if inner else torch.contiguous_format
    return torch.empty(
        shape, dtype=grad_output.dtype, device=grad_output.device, memory_format=memory_format
    )


def fold_launch(
    grad_output: Tensor, out: Tensor, block: tuple[int, int], phase: int, lattice: Lattice
) -> Launch:
    """How `fold` runs for one lattice."""
    height, width = grad_output.shape[2:]
    flat = is_flat(block, lattice)
    row_pairs = block == (1, 2) and not flat and width % 2 == 0
    if row_pairs and grad_output.is_contiguous() and out.is_contiguous():
        size, tile = out.numel(), 4 * LANES
        grid = (triton.cdiv(size, tile),)
        return Launch(_pair_sum_kernel, grid, (grad_output, out, size), {"BLOCK": tile})
    samples, channels, out_height, out_width = out.shape
    positions = out_height * out_width
    if out.stride(1) == 1 and channels > 1:
        across = min(triton.next_power_of_2(channels), 64)
        down = 8 * LANES // across
    else:
        across = 1
        down = min(triton.next_power_of_2(positions), 4 * LANES)
        across = min(triton.next_power_of_2(channels), 4 * LANES // down)
    odd = positions and phase == 1 and (height * width if flat else width) % 2
    constants = {
        "FLAT_SHIFT": 0 if not flat else 1 if phase == 0 else -1,
        "LAST": bool(odd and height * width > 1 and (flat or width > 1)),
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
        *block,
    )
    grid = (triton.cdiv(positions, down), triton.cdiv(channels, across), samples)
    return Launch(_fold_kernel, grid, arguments, constants)
