"""The kernels as torch operators (``torch.ops.fst``), which torch.compile traces without breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fst.backends import sources
from fst.basics.errors import UsageError
from fst.ops import operators
from fst.ops.cpp.pruning import like_weight

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_M = 8  # sorting larger groups takes most of the registers and seconds to compile


def _operator(like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as ``torch.ops.fst.NAME``, see `operators.register`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        traced = torch._disable_dynamo(function)  # compiled code calls it as it is
        return operators.register(function.__name__, traced, like)

    return register


def takes(*dtypes: torch.dtype) -> bool:
    """True if the kernels compute in these dtypes."""
    return all(dtype in DTYPES for dtype in dtypes)


def takes_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """True if the kernels can prune a weight (Cout, Cin/groups, kh, kw) into ``dtype``."""
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return takes(weight.dtype, dtype) and (weight.is_contiguous() or last)


def takes_grad_output(m: int, rule: str, rescale: str, dtype: torch.dtype) -> bool:
    """True if the kernels can prune grad_output by a rule `fst.NM` with these fields."""
    by_channel = rule == "magnitude_rescaled" and rescale == "channel"
    return takes(dtype) and m <= MOST_M and not by_channel


def _kernels(module: str) -> ModuleType:
    reason = sources.triton_missing()
    if reason:
        raise UsageError(f"the Triton kernels cannot run here: {reason}.")
    return sources.load(module)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@_operator(like=lambda grad_output: torch.empty_like(grad_output))
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.prune.prune_grad_output` does it.

    ``seed``: one int64 on the same device, for rule="random" only.

    Raises:
        ValueError: a rule or dtype that `takes_grad_output` refuses.
    """
    if not takes_grad_output(m, rule, rescale, grad_output.dtype):
        raise ValueError(
            f"the Triton kernels cannot prune grad_output of {grad_output.dtype} by m={m}, "
            f"rule={rule!r}, rescale={rescale!r}."
        )
    with _on(grad_output):
        return _kernels("prune_gradient").prune(grad_output, n, m, rule, rescale, groups, seed)


@_operator(like=like_weight)
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """S(W), S(Wᵀ) and the bool mask of S(W), of a weight (Cout, Cin/groups, kh, kw).

    Results have the weight's strides.

    Args:
        patterns: n and m of S(W), n and m of S(Wᵀ); with n = 0 its tensors are left out.

    Raises:
        ValueError: a weight that `takes_weight` refuses, or groups of more than `MOST_M`.
    """
    n_output, m_output, n_grad_input, m_grad_input = patterns
    if max(m_output, m_grad_input) > MOST_M:
        raise ValueError(f"patterns={list(patterns)}: m must be at most {MOST_M}.")
    if not takes_weight(weight, dtype):
        raise ValueError(
            f"the Triton kernels cannot prune weight: dtype {weight.dtype}, shape "
            f"{tuple(weight.shape)}, strides {weight.stride()}, into {dtype}."
        )
    results = like_weight(weight, patterns, dtype)
    made = iter(results)
    pruned = next(made) if n_output else None
    transposed = next(made) if n_grad_input else None
    kernels = _kernels("prune_weight")
    job = kernels.Job(weight, groups, pruned, transposed, next(made, None))
    output = (n_output, m_output) if n_output else None
    grad_input = (n_grad_input, m_grad_input) if n_grad_input else None
    with _on(weight):
        kernels.prune([job], output, grad_input)
    return results
