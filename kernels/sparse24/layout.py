"""The packed 2:4 weight, bit for bit: reference of the packing kernel and of what ``mma.sp`` reads.

A weight (Cout, Cin/groups, kh, kw) is, for each tap, a matrix of rows by k: Cout by Cin/groups for
the output, and for grad_input Cin/groups by Cout, with the taps in reverse order. It is cut into
blocks of 64 rows by 64 k, padded with zeros. Among four values along k the two largest magnitudes
are kept, exactly two always:

- magnitudes are compared as stored, before rounding to the packed dtype; ties keep the lower index,
  so that zeros of either sign give the indices 0 and 1;
- infinity and NaN are equal, and largest. One that is dropped (a third of four) is not seen any
  more, but the two kept ones beside it are not finite either.

Values and indices lie in the order in which the 32 lanes of a warp hold them (PTX ISA, "Matrix
fragments for sparse mma.m16n8k32", 16-bit operands), so that a lane loads 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # rows, and k, of a block
LEGAL = (4, 8, 9, 12, 13, 14)  # metadata of a group: first index in the low two bits


class Packed(NamedTuple):
    """A weight for one GEMM.

    Attributes:
        values: (groups, row blocks, taps, k blocks, 2, 4, 32, 8), float16 or bfloat16: for each
            half of k and tile of 16 rows, the four registers of each lane.
        metadata: (groups, row blocks, taps, k blocks, 32, 4), int32: a register of each lane for
            each tile of 16 rows; lanes 0 and 1 of four hold the first half of k, 2 and 3 the other.
    """

    values: Tensor
    metadata: Tensor


def packed_shapes(
    weight: Sequence[int], groups: int, *, transposed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the values and of the metadata of a ``weight`` (Cout, Cin/groups, kh, kw)."""
    outputs, depth, height, width = weight
    rows = outputs // groups
    if transposed:
        rows, depth = depth, rows
    blocks = (groups, -(-rows // BLOCK), height * width, -(-depth // BLOCK))
    return (*blocks, 2, 4, 32, 8), (*blocks, 32, 4)


def pack(weight: Tensor, groups: int, dtype: torch.dtype, *, transposed: bool = False) -> Packed:
    """Select 2:4 and pack, as `pack.h` does it on a GPU.

    Args:
        weight: (Cout, Cin/groups, kh, kw), dense, float32, float16 or bfloat16.
        dtype: float16 or bfloat16.
        transposed: False for S(W) of the output, True for S(Wᵀ) of grad_input.

    Raises:
        ValueError: ``dtype`` has another width.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype} must be torch.float16 or torch.bfloat16.")
    taps = _rows_by_k(weight, groups, transposed)
    pads = (-taps.shape[3] % BLOCK, -taps.shape[1] % BLOCK)
    quads = F.pad(taps, (0, pads[0], 0, 0, 0, pads[1])).unflatten(3, (-1, 4))
    first, second = _two_of_four(quads)
    kept = torch.stack([quads.gather(4, i[..., None])[..., 0] for i in (first, second)], -1)
    nibbles = (first | second << 2).to(torch.int32)
    # rows: block, tile, upper or lower half, row of eight; groups along k: block, half, ...
    rows, split = (-1, 4, 2, 8), {"row": 1, "k": 6}
    kept = kept.unflatten(split["row"], rows).unflatten(split["k"], (-1, 2, 2, 4))
    # (g, block, tile, half, row, tap, kblock, ks, h, t, 2)
    values = kept.permute(0, 1, 5, 6, 7, 2, 4, 9, 8, 3, 10)
    values = values.flatten(6, 7).flatten(7, 9).to(dtype).contiguous()
    nibbles = nibbles.unflatten(split["row"], rows).unflatten(split["k"], (-1, 2, 2, 4))
    # (g, block, tile, half, row, tap, kblock, ks, quarter, i)
    bits = nibbles.permute(0, 1, 5, 6, 4, 7, 8, 2, 3, 9).flatten(8, 9).to(torch.int64)
    words = (bits << torch.arange(0, 32, 4, device=bits.device)).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return Packed(values, signed.flatten(4, 6).contiguous())


def _rows_by_k(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """(groups, rows, taps, k)."""
    grouped = weight.detach().unflatten(0, (groups, -1)).flatten(3)  # g, Cout/g, Cin/g, taps
    return grouped.flip(3).permute(0, 2, 3, 1) if transposed else grouped.permute(0, 1, 3, 2)


def _two_of_four(quads: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = quads.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    order = magnitude.argsort(dim=-1, descending=True, stable=True)[..., :2]
    return order.amin(-1), order.amax(-1)


def unpack(packed: Packed, shape: torch.Size, *, transposed: bool = False) -> Tensor:
    """The weight (Cout, Cin/groups, kh, kw) of that ``shape`` which the instructions multiply with.

    Reads registers lane by lane as the instruction does (`operand`).
    """
    groups, row_blocks, taps, k_blocks = packed.values.shape[:4]
    matrix = packed.values.new_zeros(groups, row_blocks, taps, k_blocks, BLOCK, BLOCK)
    for tile in range(4):
        for half in range(2):
            registers = packed.values[:, :, :, :, half, tile]
            rows, columns = slice(16 * tile, 16 * tile + 16), slice(32 * half, 32 * half + 32)
            matrix[..., rows, columns] = operand(registers, packed.metadata[..., tile], half)
    matrix = matrix.permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(3, 4)  # g, rows, taps, k
    rows, depth = shape[0] // groups, shape[1]
    if transposed:
        matrix = matrix[:, :depth, :, :rows].flip(2).permute(0, 3, 1, 2)
    else:
        matrix = matrix[:, :rows, :, :depth].permute(0, 1, 3, 2)
    return matrix.flatten(0, 1).unflatten(2, shape[2:]).contiguous()


def operand(registers: Tensor, metadata: Tensor, selector: int) -> Tensor:
    """A (..., 16, 32) that ``mma.sp.m16n8k32`` multiplies with, emulated from its registers.

    Args:
        registers: (..., 32 lanes, 8): a0 to a3, two values in each.
        metadata: (..., 32 lanes), int32.
        selector: 0 or 1: which lanes of four hold the metadata.
    """
    a = registers.new_zeros(*registers.shape[:-2], 16, 32)
    for lane in range(32):
        row, place = lane // 4, lane % 4
        for register in range(4):
            owner = row + 8 * (register % 2)
            group = place + 4 * (register // 2)
            word = metadata[..., 4 * row + 2 * selector + group // 4].to(torch.int64)
            nibble = word >> (16 * (register % 2) + 4 * (group % 4)) & 15
            for which in range(2):
                index = 4 * group + (nibble >> 2 * which & 3)
                value = registers[..., lane, 2 * register + which]
                a[..., owner, :].scatter_(-1, index[..., None], value[..., None])
    return a
