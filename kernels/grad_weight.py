"""Host side of the Triton kernel for the weight gradient of the alternating rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grad_weight_triton import _grad_weight_kernel, _sum_kernel
from .launch import INT32, Launch, last_offset
from .pair_sums import Lattice, kept_sum_constants

# What is assumed where there is no GPU to ask: the multiprocessors of an H100 or H200, and the
# shared memory of an A100 for one program.
PROCESSORS = 132
SHARED_BYTES = 163 * 1024
# Programs of so many warps share a multiprocessor: their sums fill its registers.
WARPS_PER_PROCESSOR = 8
# What a thread has for sums and for values that are on their way; the rest is addresses.
FREE_REGISTERS = 176
# Storing a tile and adding it up takes about as long as so many tiles of positions (a model).
OVERHEAD = 8


class Problem(NamedTuple):
    """A weight gradient.

    Attributes:
        block: (height, width) of the block of which one output position is kept.
        restore: whether grad_output of the dropped positions is added to that of the kept one.
        lattices: (row, row step, column, column step) of the kept positions, as in
            `pair_sums.sum_into`.
        windows: the same for each lattice, of where a kept position's window begins in its input;
            rows and columns before the first are padding.
        dilation: of the window.
        groups: of the channels.
    """

    block: tuple[int, int]
    restore: bool
    lattices: Sequence[Lattice]
    windows: Sequence[Lattice]
    dilation: tuple[int, int]
    groups: int


class Tile(NamedTuple):
    """What a program computes: ``m`` output channels by ``n`` (tap, input channel), from ``k``
    positions at a time.
    """

    m: int
    n: int
    k: int
    warps: int


def grad_weight(
    grad_output: Tensor, inputs: Sequence[Tensor], out: Tensor, problem: Problem
) -> None:
    """dW = Σ (dY[kept] + dY[dropped partners]) · X[kept]ᵀ, of FST (Xu et al., AAAI 2022), Eq. 10.

    The sums of dY are rounded to its dtype, as if they were a tensor; the products are added up in
    float32, in an order that depends on the shapes and the GPU alone.

    Args:
        grad_output: (N, Cout, P, Q) in float16, bfloat16 or float32, any strides.
        inputs: for each lattice (N, Cin, H, W), in the same dtype, any strides.
        out: (Cout, Cin/groups, kh, kw), dense in any order of its axes, written over.
    """
    if out.numel():
        for launch in launches(grad_output, inputs, out, problem):
            launch.run()


def launches(
    grad_output: Tensor,
    inputs: Sequence[Tensor],
    out: Tensor,
    problem: Problem,
    tile: Tile | None = None,
) -> list[Launch]:
    """How `grad_weight` runs: one launch for each lattice, and one that adds up their parts.

    ``tile``: another one than `tile_of` chooses, to measure it.
    """
    outputs, columns = out.shape[0] // problem.groups, math.prod(out.shape[1:])
    tile = tile or tile_of(grad_output, inputs[0], out, problem.groups)
    tiles = triton.cdiv(outputs, tile.m) * triton.cdiv(columns, tile.n)
    processors, shared = _machine(out.device)
    slots = processors * WARPS_PER_PROCESSOR // tile.warps
    samples, _, *size = grad_output.shape
    counts = [samples * math.prod(_extent(size, lattice)) for lattice in problem.lattices]
    slices = [
        slices_of(triton.cdiv(count, tile.k), tiles * problem.groups, slots) for count in counts
    ]
    total = sum(slices)
    parts = out if total == 1 else out.new_empty((total, out.numel()), dtype=torch.float32)
    made = []
    for index, (count, share) in enumerate(zip(counts, slices, strict=True)):
        constants = _constants(grad_output, inputs[index], out, problem, index, tile)
        constants["num_stages"] = _stages(tile, constants, out.itemsize, shared)
        arguments = (
            grad_output,
            inputs[index],
            parts,
            *size,
            *inputs[index].shape[2:],
            count,
            triton.cdiv(triton.cdiv(count, tile.k), share) * tile.k,
            sum(slices[:index]),
            out.numel(),
            outputs,
            out.shape[1],
            out.shape[3],
            *grad_output.stride(),
            *inputs[index].stride(),
            *out.stride(),
            *problem.lattices[index],
            *problem.windows[index],
            *problem.dilation,
        )
        grid = (tiles, share, problem.groups)
        made.append(Launch(_grad_weight_kernel, grid, arguments, constants))
    if total > 1:
        made.append(_sum_launch(parts, out))
    return made


def _sum_launch(parts: Tensor, out: Tensor) -> Launch:
    count, size = parts.shape
    across = min(16, triton.next_power_of_2(count))
    constants = {"PARTS": across, "BLOCK": 1024 // across}
    grid = (triton.cdiv(size, constants["BLOCK"]),)
    return Launch(_sum_kernel, grid, (parts, out, count, size), constants)


def tile_of(grad_output: Tensor, input: Tensor, out: Tensor, groups: int) -> Tile:
    """The tile of a weight gradient."""
    m = max(16, triton.next_power_of_2(out.shape[0] // groups))
    n = max(16, triton.next_power_of_2(math.prod(out.shape[1:])))
    if out.dtype == torch.float32:  # no tensor cores for exact products
        return Tile(min(m, 64), min(n, 64), 16, 4)
    # Elements that are loaded one by one have an address each.
    m = min(m, 128 if _in_vectors(grad_output, groups) else 64)
    n = min(n, 256 if _in_vectors(input, groups) else 64)
    return Tile(m, n, 32, 8 if m * n >= 128 * 256 else 4)


def _in_vectors(tensor: Tensor, groups: int) -> bool:
    """Whether Triton, which looks for multiples of 16, loads a group's channels as vectors."""
    sizes = (tensor.shape[1] // groups, *tensor.stride()[2:], tensor.stride(0))
    return tensor.stride(1) == 1 and all(size % 16 == 0 for size in sizes)


@functools.cache
def slices_of(steps: int, tiles: int, slots: int) -> int:
    """Into how many slices ``steps`` tiles of positions are cut, so that the last program is done
    soonest where ``slots`` programs run at once.
    """

    def time(count: int) -> int:
        return triton.cdiv(tiles * count, slots) * (triton.cdiv(steps, count) + OVERHEAD)

    best = min(range(1, max(1, min(steps, 2 * slots // tiles)) + 1), key=time)
    return triton.cdiv(steps, triton.cdiv(steps, best)) if steps else 1


def _extent(size: Sequence[int], lattice: Lattice) -> Iterator[int]:
    """Rows and columns of a lattice on a map of this size."""
    for length, start, step in zip(size, lattice[::2], lattice[1::2], strict=True):
        yield triton.cdiv(length - start, step)


def _constants(
    grad_output: Tensor, input: Tensor, out: Tensor, problem: Problem, index: int, tile: Tile
) -> dict[str, Any]:
    height, width = grad_output.shape[2:]
    rows, columns = _extent((height, width), problem.lattices[index])
    channels, taps = out.shape[1], out.shape[2] * out.shape[3]
    wide = max(last_offset(t.shape, t.stride()) for t in (grad_output, input, out)) >= INT32
    return {
        "TAPS": taps,
        "ROWS": rows,
        "COLUMNS": columns,
        **kept_sum_constants(
            (height, width), problem.block, problem.lattices[index], problem.restore
        ),
        "INDEX": tl.int64 if wide else tl.int32,
        "UNSIGNED": tl.uint64 if wide else tl.uint32,
        "ONE_TAP": taps == 1 or channels % tile.n == 0,
        "M": tile.m,
        "N": tile.n,
        "K": tile.k,
        "num_warps": tile.warps,
    }


def _stages(tile: Tile, constants: dict[str, Any], itemsize: int, shared: int) -> int:
    """How many tiles of positions are in flight, up to four: those of the input wait in shared
    memory, those of grad_output in registers.
    """
    terms = constants["BLOCK_HEIGHT"] * constants["BLOCK_WIDTH"] or 1
    terms += bool(constants["FLAT_SHIFT"]) + constants["LAST"]
    threads = 32 * tile.warps
    registers = max(1, terms * tile.m * tile.k * itemsize // (4 * threads))
    space = shared * tile.warps // WARPS_PER_PROCESSOR - tile.m * tile.k * itemsize
    fitting = (FREE_REGISTERS - tile.m * tile.n // threads) // registers
    return 1 + max(1, min(3, fitting, space // (tile.k * tile.n * itemsize) - 1))


@functools.cache
def _machine(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of each that programs may use."""
    if device.type != "cuda":
        return PROCESSORS, SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
