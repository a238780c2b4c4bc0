"""N:M masks as pure functions of a tensor. True means kept.

Every mask keeps exactly N of each full group of M consecutive elements along one axis (zeros
included), and min(N, r) of a shorter last group of r, so it satisfies the pattern whatever the
values are. Ties keep the lower index; NaN counts as an infinite magnitude.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from fst.basics.values import is_integer, one_of

MAX_M = 32
CPU_BLOCK = 2**22  # elements
CPU_PART = 2**19
RESCALES = ("sample_channel", "channel", "group")
# The integer type of a float's bits, and what infinity looks like in it.
INTEGERS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


def check_pattern(n: int, m: int) -> None:
    """Raise ValueError unless 1 <= n <= m <= 32, both integers."""
    for name, value in (("n", n), ("m", m)):
        if not is_integer(value):
            raise ValueError(f"{name}={value!r} must be an integer, with 1 <= n <= m <= {MAX_M}.")
    if not 1 <= n <= m <= MAX_M:
        raise ValueError(f"n={n}, m={m}: the pattern n:m needs 1 <= n <= m <= {MAX_M}.")


def read_pattern(argument: str, text: object) -> tuple[int, int]:
    """n and m of "n:m".

    Raises:
        ValueError: ``text``, the value of ``argument``, is anything else.
    """
    n, _, m = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not (n.isdecimal() and m.isdecimal()):
        raise ValueError(f"{argument}={text!r} must be a string 'n:m', such as '2:4'.")
    check_pattern(int(n), int(m))
    return int(n), int(m)


def nm_mask(
    tensor: Tensor,
    n: int,
    m: int,
    dim: int,
    rule: str = "magnitude",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mask that keeps ``n`` of every ``m`` consecutive elements along ``dim``.

    Args:
        tensor: any shape and memory format, floating point.
        n, m: 1 <= n <= m <= 32; n == m keeps everything.
        dim: the axis along which groups run (the GEMM's reduction axis).
        rule: "magnitude" keeps the n largest absolute values, "random" a uniformly random n-subset.
        generator: source of randomness of "random"; torch's default generator if None.

    Returns:
        Boolean tensor of the same shape and memory format.

    Raises:
        ValueError: pattern out of range, unknown rule.
        TypeError: ``tensor`` is not floating point.
        IndexError: ``dim`` out of range.
    """
    check_pattern(n, m)
    check_rule(tensor, rule)
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim={dim} must be one of the {tensor.dim()} axes of the tensor.")
    if torch.compiler.is_compiling() and tensor.device.type == "cpu" and rule == "magnitude":
        return _nm_mask_on_cpu(tensor, n, m, dim)
    dim = range(tensor.dim())[dim]
    if n == m or tensor.numel() == 0:
        return torch.ones_like(tensor, dtype=torch.bool)
    values = tensor if rule == "magnitude" else _random_like(tensor, generator)
    mask = torch.empty_like(tensor, dtype=torch.bool)
    for block, kept in _blocks(values, mask, m, dim):
        _keep_largest(_magnitude(block), n, m, dim, kept)
    return mask


@custom_op("fst::nm_mask_on_cpu", mutates_args=())
def _nm_mask_on_cpu(tensor: Tensor, n: int, m: int, dim: int) -> Tensor:
    """Opaque to Inductor, whose CPU loops over groups are several times slower than torch's."""
    return nm_mask(tensor, n, m, dim)


@_nm_mask_on_cpu.register_fake
def _(tensor: Tensor, n: int, m: int, dim: int) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.bool)


def is_plain(tensor: Tensor) -> bool:
    """True for a plain tensor outside compiled code: other operators serve the rest better."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


def apply_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """``tensor`` where kept, else 0. Inf and NaN stay visible even where they are dropped."""
    if not is_plain(tensor):
        return tensor * as_integers(mask)
    factor = torch.empty_like(tensor).copy_(as_integers(mask))
    return torch.mul(tensor, factor, out=factor)


def remove_kept(tensor: Tensor, mask: Tensor) -> Tensor:
    """``tensor`` less what `apply_mask` keeps of it."""
    if not is_plain(tensor):
        return tensor * as_integers(~mask)
    if not tensor.is_cpu:
        return tensor.masked_fill(mask, 0)
    factor = torch.empty_like(tensor).copy_(as_integers(mask))
    return torch.addcmul(tensor, tensor, factor, value=-1, out=factor)


def as_integers(mask: Tensor) -> Tensor:
    """0 and 1 as int8, with which a CPU computes several times faster than with bool."""
    # Inductor cannot lower the view, and fuses the conversion anyway.
    return mask.to(torch.int8) if torch.compiler.is_compiling() else mask.view(torch.int8)


def top_k_mask(tensor: Tensor, k: int) -> Tensor:
    """Mask (N, ...) that keeps the ``k`` largest absolute values of each sample, exactly.

    ``tensor`` has any memory format. Ties keep the lower index in the order of the shape.
    """
    if tensor.numel() == 0 or k == tensor[0].numel():
        return torch.ones_like(tensor, dtype=torch.bool)
    magnitude = _magnitude(tensor).flatten(1)
    least = magnitude.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    kept, ties = magnitude > least, magnitude == least
    kept |= ties & (ties.cumsum(1) <= k - kept.sum(1, keepdim=True))
    return kept.unflatten(1, tensor.shape[1:])


def largest_mask(scores: Tensor, keep: int) -> Tensor:
    """Mask of the ``keep`` largest of all ``scores`` (any shape), signs included."""
    order = scores.flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros_like(order, dtype=torch.bool)
    return mask.index_fill(0, order[:keep], True).view(scores.shape)


def kept_count(total: int, sparsity: float) -> int:
    """Return ``total`` − round(sparsity · total), but at least 1."""
    return max(1, total - round(sparsity * total))


def unstructured_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Mask of the largest magnitudes of all ``weight``."""
    return largest_mask(weight.abs(), kept_count(weight.numel(), sparsity))


def widened(tensor: Tensor) -> Tensor:
    """``tensor`` at least in float32, in which squares of small numbers are not 0."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def constant(values: Sequence[object], device: torch.device) -> Tensor:
    """A small table on ``device``, without waiting for it."""
    return torch.tensor(values, device="cpu").to(device, non_blocking=True)


def check_rule(tensor: Tensor, rule: str) -> None:
    """Raise unless ``tensor`` is floating point and ``rule`` is "magnitude" or "random"."""
    if tensor.dtype not in INTEGERS:
        allowed = ", ".join(map(str, INTEGERS))
        raise TypeError(f"tensor has dtype {tensor.dtype}; allowed are floating point: {allowed}.")
    one_of("rule", rule, ("magnitude", "random"))


def _random_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in float64: in lower precision ties would favour low indices."""
    device = tensor.device if generator is None else generator.device
    draws = torch.rand(tensor.shape, generator=generator, device=device, dtype=torch.float64)
    return draws.to(tensor.device)


def _magnitude(tensor: Tensor) -> Tensor:
    """Absolute values as integers of the same order; NaN becomes infinity."""
    width, infinity = INTEGERS[tensor.dtype]
    return tensor.abs().view(width).clamp_(max=infinity)


def _blocks(values: Tensor, mask: Tensor, m: int, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole groups at a time, small enough to stay in a CPU's cache; elsewhere all at once."""
    on_cpu = values.device.type == "cpu" and not torch.compiler.is_compiling()
    if not on_cpu or values.numel() <= CPU_BLOCK:
        yield values, mask
        return
    # along which blocks lie apart in memory
    axis = max(range(values.dim()), key=lambda d: (values.shape[d] > 1) * values.stride(d))
    step = max(1, CPU_BLOCK // (values.numel() // values.shape[axis]))
    if axis == dim:
        step = max(m, step // m * m)
    yield from zip(values.split(step, axis), mask.split(step, axis), strict=True)


def samples_in_cache(tensor: Tensor, elements: int | None = None) -> int:
    """Return the number of samples of (N, ...) to prune at a time, since several passes read them.

    On a CPU as many as its cache holds, elsewhere all. ``elements`` are those of what is made of
    one sample, by default its own.
    """
    on_cpu = tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    if not on_cpu or not tensor.numel():
        return len(tensor)
    part = max(1, CPU_PART // (elements or tensor[0].numel()))
    return min(len(tensor), part)


def _keep_largest(scores: Tensor, n: int, m: int, dim: int, mask: Tensor) -> None:
    """Fill ``mask`` by comparing all pairs: on groups this small several times faster than a sort.

    ``scores`` are non-negative integers. An element is beaten by a larger one, and by an equal one
    of lower index, so exactly n elements are beaten by fewer than n.
    """
    size = scores.shape[dim]
    if size % m:
        padding = [0, 0] * (scores.dim() - 1 - dim) + [0, -size % m]
        scores = F.pad(scores, padding, value=-1)
        padded = torch.empty_like(scores, dtype=torch.bool)
    else:
        padded = mask
    _n_of_m(_members(scores, m, dim), n, _members(padded, m, dim))
    if size % m:
        mask.copy_(padded.narrow(dim, 0, size))


def _members(tensor: Tensor, m: int, dim: int) -> list[Tensor]:
    """The first elements of all groups, the second ones, ...: views."""
    if torch.compiler.is_compiling():  # Inductor would keep the offset of an as_strided
        return list(tensor.unflatten(dim, (-1, m)).unbind(dim + 1))
    size, strides, start = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    step = strides[dim]
    size[dim] //= m
    strides[dim] *= m
    return [tensor.as_strided(size, strides, start + i * step) for i in range(m)]


def _n_of_m(elements: Sequence[Tensor], n: int, kept: Sequence[Tensor]) -> None:
    m = len(elements)
    beaten = [torch.full_like(e, m - 1 - i, dtype=torch.int8) for i, e in enumerate(elements)]
    for i, j in itertools.combinations(range(m), 2):
        lower_wins = as_integers(elements[i] >= elements[j])
        beaten[i].sub_(lower_wins)
        beaten[j].add_(lower_wins)
    for count, target in zip(beaten, kept, strict=True):
        if torch.compiler.is_compiling():  # Inductor takes no view as out
            target.copy_(count < n)
        else:
            torch.lt(count, n, out=target)


def l1_scale(dense: Tensor, pruned: Tensor, rescale: str, m: int, dim: int) -> Tensor:
    """Factor that restores the L1 norm which pruning removed (SDGP, section III-B).

    Args:
        dense, pruned: (N, C, P, Q) before and after pruning; for "group" any shape.
        rescale: "sample_channel" (per sample and channel, over positions: the published code),
            "channel" (per channel, over samples and positions: the paper's text) or
            "group" (every group of m along ``dim`` keeps its own norm).
        m, dim: group size and axis, used by "group".

    Returns:
        Tensor that broadcasts against ``pruned``, in its dtype, or in float32 for float16, whose
        range is too small. Sums are taken in float32 (float64 for float64 tensors); where nothing
        was kept the factor is 1.
    """
    wide = torch.float64 if dense.dtype == torch.float64 else torch.float32
    before, after = dense.abs(), pruned.abs()
    if dense.dtype != wide:
        before, after = before.to(wide), after.to(wide)

    def reduce(values: Tensor) -> Tensor:
        if rescale == "sample_channel":
            return values.sum((2, 3), keepdim=True)
        if rescale == "channel":
            return values.sum((0, 2, 3), keepdim=True)
        size = dense.shape[dim]
        tail = [0, 0] * (dense.dim() - 1 - dim) + [0, -size % m]
        sums = F.pad(values, tail).unflatten(dim, (-1, m)).sum(dim + 1)
        return sums.repeat_interleave(m, dim).narrow(dim, 0, size)

    kept = reduce(after)
    scale = torch.where(kept > 0, reduce(before) / kept, 1.0)
    return scale if dense.dtype in (wide, torch.float16) else scale.to(dense.dtype)
