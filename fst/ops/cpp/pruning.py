"""N:M pruning of weights and of grad_output, by the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fst.ops.cpp.library import (
    KINDS,
    LAST,
    call,
    check_dense,
    check_groups,
    integers,
    is_plain,
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


class WeightPruning:
    """`prune_weight` of weights of one shape, dtype and order, which are checked once."""

    def __init__(
        self, weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Arguments as those of `prune_weight`; only the form of the weight counts."""
        check_dense("weight", weight, "(Cout, Cin/groups, kh, kw)")
        rows, channels, height, width = weight.shape
        check_groups(groups, rows)
        if dtype not in RESULTS.get(weight.dtype, ()):
            raise TypeError(f"weight has dtype {weight.dtype}, the result {dtype}.")
        n_output, m_output, n_grad_input, m_grad_input = patterns
        _check_pattern(n_output, m_output, least=0)
        _check_pattern(n_grad_input, m_grad_input, least=0)
        self._patterns, self._dtype = patterns, dtype
        self._sizes = (rows // groups, channels, height * width, weight.stride(1) == 1, groups)
        self._kinds, self._is_empty = (KINDS[weight.dtype], KINDS[dtype]), not weight.numel()

    def __call__(self, weight: Tensor) -> list[Tensor]:
        results = like_weight(weight, self._patterns, self._dtype)
        if not self._is_empty:
            pointers = [result.data_ptr() for result in results]
            n_output, _, n_grad_input, _ = self._patterns
            output, mask = (pointers[0], pointers[-1]) if n_output else (None, None)
            grad_input = pointers[bool(n_output)] if n_grad_input else None
            numbers = (*self._kinds, *self._sizes, *self._patterns)
            call("fst_prune_weight", weight.data_ptr(), *numbers, output, mask, grad_input)
        return results


@operator(like=like_weight)
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """S(W), S(Wᵀ) and the mask of S(W), as `fst.ops.triton.prune_weight` gives them."""
    return WeightPruning(weight, groups, patterns, dtype)(weight)


def adds_residual(target: Tensor, weight: Tensor, mask: Tensor) -> bool:
    """True if `add_residual` takes these: float32 and bool, in one order of their elements.

    It is no operator, so no compiler can take it.
    """
    if torch.compiler.is_compiling() or missing():
        return False
    given = target, weight, mask
    if not all(map(is_plain, given)) or mask.dtype != torch.bool:
        return False
    if target.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if all(x.is_contiguous() for x in given):
        return True
    return all(x.dim() == 4 and x.is_contiguous(memory_format=LAST) for x in given)


def add_residual(target: Tensor, weight: Tensor, mask: Tensor, factor: float) -> None:
    """target += factor·(W − S(W)) in place, see `fst.ops.prune.add_residual`."""
    if target.numel():
        pointers = (weight.data_ptr(), mask.data_ptr(), target.data_ptr())
        number = ctypes.c_double(factor)
        call("fst_add_residual", *pointers, target.numel(), ctypes.addressof(number))
    torch.autograd.graph.increment_version(target)


@operator(like=lambda grad_output: torch.empty_like(grad_output))
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.triton.prune_grad_output` does it."""
    check_dense("grad_output", grad_output, "(N, C, P, Q)")
    if grad_output.dtype not in KINDS:
        raise TypeError(f"grad_output has dtype {grad_output.dtype}.")
    _check_pattern(n, m, 1, MOST_DRAWN_M if rule == "random" else MOST_M)
    samples, channels, height, width = grad_output.shape
    check_groups(groups, channels)
    if rule != "random":
        seed = None
    elif seed is None or seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError("rule='random' needs seed=, one int64.")
    pruned = torch.empty_like(grad_output)
    if not pruned.numel():
        return pruned
    place = 2 if width == 1 else 3
    read, written = (
        integers(*(x.stride(axis) for axis in (0, 1, place))) for x in (grad_output, pruned)
    )
    rescaled = rescale if rule == "magnitude_rescaled" else ""
    call(
        "fst_prune_grad_output",
        *(grad_output.data_ptr(), pruned.data_ptr(), KINDS[grad_output.dtype]),
        *(samples, channels, height * width, read, written, n, m),
        *(rescaled == "group", rescaled == "sample_channel", groups),
        None if seed is None else seed.data_ptr(),
    )
    return pruned


def _check_pattern(n: int, m: int, least: int, most: int = MOST_M) -> None:
    if not least <= n <= m <= most:
        raise ValueError(f"n={n}, m={m}: {least} <= n <= m <= {most}.")
