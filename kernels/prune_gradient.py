"""Host side of the Triton kernels that prune grad_output (N, C, P, Q) along C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from .launch import Launch, Layout, Tile, collapse, layout_of, tile_of, within_32_bits
from .prune_triton import _prune_kernel, _scale_kernel, _sums_kernel
from .select_triton import sorting_network

PROGRAMS = 1024  # that keep a large GPU busy


@functools.cache
def _plan(
    layout: Layout, out: Layout, n: int, m: int, run: int, groups: int, itemsize: int
) -> tuple[Tile, tuple[int, int], dict[str, Any]]:
    tile = tile_of(layout, out, run * m, groups, itemsize)
    constants = {**tile.constants(), "N": n, "M": m, "NETWORK": sorting_network(m)}
    return tile, tile.grid(layout, run * m, groups), constants


def prune(
    grad_output: Tensor,
    n: int,
    m: int,
    rule: str = "magnitude",
    rescale: str = "sample_channel",
    groups: int = 1,
    seed: Tensor | None = None,
) -> Tensor:
    """`fst.ops.prune.prune_grad_output` for the grad_input GEMM.

    Args:
        grad_output: (N, C, P, Q) in float16, bfloat16 or float32, any strides; C divisible by
            ``groups``. Strides that do not step evenly through the positions cost a copy.
        n, m, rule, rescale: see `fst.NM`; m up to 8, no rescale="channel".
        seed: of the rule "random": one int64 on the same device.

    Returns:
        Tensor of the same shape and dtype; same strides where those are dense.

    Raises:
        ValueError: ``seed`` is missing, or see `launch.within_32_bits`.
    """
    if rule == "random" and seed is None:
        raise ValueError("rule='random' needs seed=, an int64 tensor on the same device.")
    return planned(grad_output, n, m, rule, rescale, groups)(grad_output, seed)


def planned(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`prune` as a function of tensors of the form of this one, which it does not keep, and seeds.

    Raises:
        ValueError: see `launch.within_32_bits`.
    """
    if n == m or grad_output.numel() == 0:
        return lambda grad_output, _: grad_output.clone(memory_format=torch.preserve_format)
    form = torch.empty_strided(
        grad_output.shape, grad_output.stride(), dtype=grad_output.dtype, device="meta"
    )
    source = within_32_bits(form)
    if layout_of(source) is None:
        source = source.contiguous()
    moves = source is not form
    rescales = rule == "magnitude_rescaled" and rescale != "group"
    factors = _scaling(source, n, m, groups) if rescales else None
    scale = source.new_empty(source.shape[:2]) if rescales else None
    result = torch.empty_like(form)
    launch = prune_launch(source, result, n, m, rule, rescale, groups, None, scale).on_others(4)

    def run(grad_output: Tensor, seed: Tensor | None) -> Tensor:
        result = torch.empty_like(grad_output)
        source = grad_output.contiguous() if moves else grad_output
        scale = source if factors is None else factors(source)
        launch(source, result, source if seed is None else seed, scale)
        return result

    return run


def prune_launch(
    grad_output: Tensor,
    result: Tensor,
    n: int,
    m: int,
    rule: str,
    rescale: str,
    groups: int,
    seed: Tensor | None,
    scale: Tensor | None,
) -> Launch:
    """Return the launch of `prune`'s kernel."""
    layout, out = layout_of(grad_output), layout_of(result)
    if scale is None:
        layout, out = collapse(layout, out)
    # Groups that share the four words of a draw, as far as one 16-byte vector holds them.
    run = 8 // m if rule == "random" and m & (m - 1) == 0 else 1
    tile, grid, constants = _plan(layout, out, n, m, run, groups, grad_output.itemsize)
    unit = 1 if tile.channel_inner else tile.align
    arguments = (
        grad_output,
        result,
        grad_output if seed is None else seed,
        grad_output if scale is None else scale,
        *_sizes(layout, groups, unit),
        out.sample // unit,
        out.channel // unit,
        out.position,
        grid[0],
    )
    by_group = rule == "magnitude_rescaled" and rescale == "group"
    constants = {
        **constants,
        "RUN": run,
        "RULE": 2 if rule == "random" else 1,
        "SCALE": 2 if scale is not None else 1 if by_group else 0,
    }
    return Launch(_prune_kernel, (layout.samples * grid[0], grid[1]), arguments, constants)


def _sizes(layout: Layout, groups: int, unit: int) -> tuple[int, ...]:
    """Return sizes of grad_output for the kernels; positions and strides in units of a vector."""
    return (
        layout.positions // unit,
        layout.channels,
        layout.channels // groups,
        layout.sample // unit,
        layout.channel // unit,
        layout.position,
    )


def _scaling(grad_output: Tensor, n: int, m: int, groups: int) -> Callable[[Tensor], Tensor]:
    """Factors (samples, channels) in float32, as float16 cannot hold those above 65504: a function
    of tensors of the form of this one.
    """
    made, sums = sums_launch(grad_output, n, m, groups)
    add, shape = made.on_others(2), sums.shape
    samples, chunks, _, channels = shape
    block, rows = 32, min(32, triton.next_power_of_2(chunks))
    divide = _scale_kernel[(samples, triton.cdiv(channels, block))]

    def factors(grad_output: Tensor) -> Tensor:
        sums = grad_output.new_empty(shape, dtype=torch.float32)
        add(grad_output, sums)
        scale = sums.new_empty((samples, channels))
        divide(sums, scale, channels, chunks, ROWS=rows, BLOCK=block)
        return scale

    return factors


def sums_launch(grad_output: Tensor, n: int, m: int, groups: int) -> tuple[Launch, Tensor]:
    """Return the launch of the sums for rescaling, and memory (samples, chunks, 2, channels)."""
    layout = layout_of(grad_output)
    tile, (tiles, group_tiles), constants = _plan(
        layout, layout, n, m, 1, groups, grad_output.itemsize
    )
    unit = 1 if tile.channel_inner else tile.align
    # Enough programs to fill a GPU, and as few partial sums as that allows.
    chunks = min(tiles, triton.cdiv(PROGRAMS, layout.samples * group_tiles))
    sums = grad_output.new_empty((layout.samples, chunks, 2, layout.channels), dtype=torch.float32)
    arguments = (
        grad_output,
        sums,
        *_sizes(layout, groups, unit),
        chunks,
        triton.cdiv(tiles, chunks),
    )
    grid = (layout.samples * chunks, group_tiles)
    return Launch(_sums_kernel, grid, arguments, constants), sums
