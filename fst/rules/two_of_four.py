"""2:4 masks of magnitudes in few operations, along several axes at once.

Each element's key is its magnitude with a number below that breaks ties for the lower index. Keys
differ within a group, so those from the second largest on are the two that are kept, and one tensor
of keys serves groups along any of the axes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = 4
TIE_BITS = 8  # a magnitude counts so much more than the tie of two axes, 6 at most
CPU_BLOCK = 2**20  # elements
MOST_KNOWN = 256
# The integer type of a float's bits, and what infinity looks like in it.
INTEGERS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


class _Constants(NamedTuple):
    without_sign: Tensor
    infinity: Tensor
    ties: Tensor


_KNOWN: dict[tuple[object, ...], _Constants] = {}


def is_plain(tensor: Tensor) -> bool:
    """True for a plain tensor outside compiled code: other operators serve the rest better."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


def slowest_axis(tensor: Tensor) -> int:
    """The axis along which blocks lie apart in memory."""
    return max(range(tensor.dim()), key=lambda d: (tensor.shape[d] > 1) * tensor.stride(d))


def takes(tensor: Tensor, dims: tuple[int, ...]) -> bool:
    """True if `two_of_four` can prune it along ``dims``."""
    if not is_plain(tensor) or not tensor.numel() or tensor.dtype.itemsize > 4:
        return False
    return len(dims) == 1 or all(tensor.shape[dim] % M == 0 for dim in dims)


def two_of_four(tensor: Tensor, dims: tuple[int, ...]) -> list[Tensor]:
    """Masks of the two largest magnitudes of each four along each of ``dims``, one mask each.

    Ties keep the lower index; NaN counts as infinity. Each mask has the tensor's memory format.
    """
    count, size = tensor.numel(), tensor.shape[dims[0]]
    if size % M:  # zeros at the end win nothing
        tail = [0, 0] * (tensor.dim() - 1 - dims[0]) + [0, -size % M]
        padded = two_of_four(F.pad(tensor, tail), dims)[0].narrow(dims[0], 0, size)
        return [torch.empty_like(tensor, dtype=torch.bool).copy_(padded)]
    if tensor.device.type != "cpu" or count <= CPU_BLOCK:
        return _of_block(tensor, dims)
    found = [torch.empty_like(tensor, dtype=torch.bool) for _ in dims]
    axis = slowest_axis(tensor)
    step = CPU_BLOCK * tensor.shape[axis] // count // M * M or M
    blocks = (t.split(step, axis) for t in (tensor, *found))
    for block, *targets in zip(*blocks, strict=True):
        for target, mask in zip(targets, _of_block(block, dims), strict=True):
            target.copy_(mask)
    return found


def _of_block(tensor: Tensor, dims: tuple[int, ...]) -> list[Tensor]:
    without_sign, infinity, ties = _constants(tensor, dims)
    magnitude = torch.bitwise_and(tensor.view(without_sign.dtype), without_sign)
    torch.minimum(magnitude, infinity, out=magnitude)
    keys = torch.empty_like(tensor, dtype=torch.int64).copy_(magnitude)
    torch.add(ties, keys, alpha=TIE_BITS, out=keys)
    return [_from_second_on(keys, dim) for dim in dims]


def _from_second_on(keys: Tensor, dim: int) -> Tensor:
    """Return a mask of the keys that are at least the second largest of their group."""
    size, strides = list(keys.shape), list(keys.stride())
    step = strides[dim]
    size[dim] //= M
    strides[dim] *= M
    a, b, c, d = (keys.as_strided(size, strides, i * step) for i in range(M))
    first, second = torch.maximum(a, b), torch.minimum(a, b)
    second = torch.clamp(c, second, first)
    torch.maximum(first, c, out=first)
    torch.clamp(d, second, first, out=second)
    kept = torch.ge(keys.as_strided([M, *size], [step, *strides]), second)
    return kept.as_strided(keys.shape, keys.stride())


def _constants(tensor: Tensor, dims: tuple[int, ...]) -> _Constants:
    """Made once: they are small operations, as many as the rest."""
    sizes = tuple(size if dim in dims else 1 for dim, size in enumerate(tensor.shape))
    key = (sizes, tensor.dtype, tensor.device)
    known = _KNOWN.get(key)
    if known is not None:
        return known
    integer, infinity = INTEGERS[tensor.dtype]
    ties = torch.zeros(sizes, dtype=torch.int64, device=tensor.device)
    for dim in dims:
        falling = M - 1 - torch.arange(sizes[dim], device=tensor.device) % M
        ties += falling.view([-1, *[1] * (tensor.dim() - 1 - dim)])
    made = _Constants(
        torch.tensor(torch.iinfo(integer).max, dtype=integer, device="cpu"),
        torch.tensor(infinity, dtype=integer, device="cpu"),
        ties,
    )
    if type(ties) is Tensor and not ties.is_inference():
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = made
    return made
