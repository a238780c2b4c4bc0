"""N:M pruning of weights and of grad_output, by the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from fst.ops.cpp.library import (
    KINDS,
    LAST,
    check_dense,
    check_groups,
    integers,
    kernel,
    missing,
    operator,
    refuses_operands,
)

MOST_M = 32
MOST_DRAWN_M = 8  # of random rules
RESULTS = {  # dtype of a weight -> dtypes into which it can be pruned
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


def refuses_weight(weight: Tensor, dtype: torch.dtype) -> str:
    """The reason why the kernels cannot prune a weight (Cout, Cin/groups, kh, kw) into ``dtype``;
    "" if they can.
    """
    if dtype not in RESULTS.get(weight.dtype, ()):
        return f"it does not prune {weight.dtype} into {dtype}"
    return missing() or refuses_operands(weight)


def refuses_grad_output(grad_output: Tensor, m: int, rule: str, rescale: str) -> str:
    """The reason why the kernels cannot prune grad_output by a rule `fst.NM` with these fields;
    "" if they can.
    """
    most = MOST_DRAWN_M if rule == "random" else MOST_M
    if m > most:
        return f"groups of {m} are more than {most}"
    if rule == "magnitude_rescaled" and rescale == "channel":
        return "it does not rescale whole channels"
    return missing() or refuses_operands(grad_output)


def like_weight(weight: Tensor, patterns: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Empty results of `prune_weight`."""
    n_output, _, n_grad_input, _ = patterns
    pruned = [torch.empty_like(weight, dtype=dtype) for n in (n_output, n_grad_input) if n]
    return [*pruned, torch.empty_like(weight, dtype=torch.bool)] if n_output else pruned


@operator(like=like_weight, tensors=1, returns="list[Tensor]")
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """S(W), S(Wᵀ) and the mask of S(W), as `fst.ops.triton.prune_weight` gives them."""
    check_dense("weight", weight, "(Cout, Cin/groups, kh, kw)")
    rows, channels, height, width = weight.shape
    check_groups(groups, rows)
    if dtype not in RESULTS.get(weight.dtype, ()):
        raise TypeError(f"weight has dtype {weight.dtype}, the result {dtype}.")
    n_output, m_output, n_grad_input, m_grad_input = patterns
    _check_pattern(n_output, m_output, least=0)
    _check_pattern(n_grad_input, m_grad_input, least=0)
    sizes = (rows // groups, channels, height * width, weight.stride(1) == 1, groups)
    numbers = (KINDS[weight.dtype], KINDS[dtype], *sizes, *patterns)
    run, is_empty = kernel("fst_prune_weight"), not weight.numel()

    def prune(weight: Tensor) -> list[Tensor]:
        first = second = mask = None
        results = []
        if n_output:
            results.append(first := torch.empty_like(weight, dtype=dtype))
        if n_grad_input:
            results.append(second := torch.empty_like(weight, dtype=dtype))
        if n_output:
            results.append(mask := torch.empty_like(weight, dtype=torch.bool))
        if not is_empty:
            run(
                *(weight.data_ptr(), *numbers, None if first is None else first.data_ptr()),
                None if mask is None else mask.data_ptr(),
                None if second is None else second.data_ptr(),
            )
        return results

    return prune


def adds_residual(target: Tensor, weight: Tensor, mask: Tensor) -> bool:
    """True if `add_residual` takes these: float32 and bool, in one order of their elements.

    It is no operator, so no compiler can take it.
    """
    first = torch.contiguous_format if target.is_contiguous() else LAST
    if first is LAST and target.dim() != 4:
        return False
    for x, dtype in ((target, torch.float32), (weight, torch.float32), (mask, torch.bool)):
        if not (x.is_cpu and x.dtype == dtype and type(x) in (Tensor, Parameter)):
            return False
        if not x.is_contiguous(memory_format=first):
            return False
    return not (torch.compiler.is_compiling() or missing())


def add_residual(target: Tensor, weight: Tensor, mask: Tensor, factor: float) -> None:
    """target += factor·(W − S(W)) in place, see `fst.ops.prune.add_residual`."""
    if target.numel():
        pointers = (weight.data_ptr(), mask.data_ptr(), target.data_ptr())
        number = ctypes.c_double(factor)
        kernel("fst_add_residual")(*pointers, target.numel(), ctypes.addressof(number))
    torch.autograd.graph.increment_version(target)


@operator(like=lambda grad_output: torch.empty_like(grad_output), tensors=1)
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.triton.prune_grad_output` does it."""
    check_dense("grad_output", grad_output, "(N, C, P, Q)")
    if grad_output.dtype not in KINDS:
        raise TypeError(f"grad_output has dtype {grad_output.dtype}.")
    _check_pattern(n, m, 1, MOST_DRAWN_M if rule == "random" else MOST_M)
    samples, channels, height, width = grad_output.shape
    check_groups(groups, channels)
    if rule == "random" and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError("rule='random' needs seed=, one int64.")
    place = 2 if width == 1 else 3
    strides = [grad_output.stride(axis) for axis in (0, 1, place)]
    made = torch.empty_like(grad_output, device="meta")
    written = integers(*(made.stride(axis) for axis in (0, 1, place)))
    rescaled = rescale if rule == "magnitude_rescaled" else ""
    numbers = (
        *(KINDS[grad_output.dtype], samples, channels, height * width, integers(*strides)),
        *(written, n, m, rescaled == "group", rescaled == "sample_channel", groups),
    )
    run, is_empty = kernel("fst_prune_grad_output"), not grad_output.numel()
    draw = seed if rule == "random" else None

    def prune(grad_output: Tensor) -> Tensor:
        pruned = torch.empty_like(grad_output)
        if not is_empty:
            drawn = None if draw is None else draw.data_ptr()
            run(grad_output.data_ptr(), pruned.data_ptr(), *numbers, drawn)
        return pruned

    return prune


def _check_pattern(n: int, m: int, least: int, most: int = MOST_M) -> None:
    if not least <= n <= m <= most:
        raise ValueError(f"n={n}, m={m}: {least} <= n <= m <= {most}.")
