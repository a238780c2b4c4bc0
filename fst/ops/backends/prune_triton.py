"""N:M pruning of weights and of grad_output, by the Triton kernels for GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fst.backends import sources
from fst.backends.registry import NO_GAIN, register_backend
from fst.basics.errors import UsageError
from fst.ops import cpp, operators
from fst.ops.backends.prune_cpp import PruneByKernel, from_kernel, like_weight
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import PrunedWeight

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_M = 8  # sorting larger groups takes most of the registers and seconds to compile


def _operator(like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as ``torch.ops.fst.NAME``, see `operators.register`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        traced = torch._disable_dynamo(function)  # compiled code calls it as it is
        return operators.register(function.__name__, traced, like)

    return register


def _kernels(module: str) -> ModuleType:
    reason = sources.triton_missing()
    if reason:
        raise UsageError(f"the Triton kernels cannot run here: {reason}.")
    return sources.load(module)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _refuses_weight(weight: Tensor, dtype: torch.dtype) -> str:
    """The reason why the kernels cannot prune a weight (Cout, Cin/groups, kh, kw) into ``dtype``;
    "" if they can.
    """
    if weight.dtype in DTYPES and dtype in DTYPES and cpp.is_dense(weight):
        return ""
    form = f"{weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}"
    return f"{form} into {dtype} must be of {DTYPES}, contiguous or channels_last"


def _refuses_grad_output(m: int, rule: str, rescale: str, dtype: torch.dtype) -> str:
    """The reason why the kernels cannot prune grad_output by a rule `fst.NM` with these fields;
    "" if they can.
    """
    by_channel = rule == "magnitude_rescaled" and rescale == "channel"
    if dtype in DTYPES and m <= MOST_M and not by_channel:
        return ""
    return f"m={m}, rule={rule!r}, rescale={rescale!r} in {dtype} are none that they know"


@_operator(like=lambda grad_output: torch.empty_like(grad_output))
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.prune.prune_grad_output` does it.

    ``seed``: one int64 on the same device, for rule="random" only.

    Raises:
        ValueError: a rule or dtype that the kernels do not know.
    """
    if reason := _refuses_grad_output(m, rule, rescale, grad_output.dtype):
        raise ValueError(f"the Triton kernels cannot prune grad_output: {reason}.")
    with _on(grad_output):
        return _kernels("prune_gradient").prune(grad_output, n, m, rule, rescale, groups, seed)


@_operator(like=like_weight)
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """S(W), S(Wᵀ) and the bool mask of S(W), of a weight (Cout, Cin/groups, kh, kw).

    Results have the weight's strides.

    Args:
        patterns: n and m of S(W), n and m of S(Wᵀ); with n = 0 its tensors are omitted.

    Raises:
        ValueError: a weight that the kernels cannot read, or groups of more than `MOST_M`.
    """
    n_output, m_output, n_grad_input, m_grad_input = patterns
    if max(m_output, m_grad_input) > MOST_M:
        raise ValueError(f"patterns={list(patterns)}: m must be at most {MOST_M}.")
    if reason := _refuses_weight(weight, dtype):
        raise ValueError(f"the Triton kernels cannot prune weight: {reason}.")
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


class PruneByTriton(PruneByKernel):
    """One launch for each operand."""

    name = "triton"
    most_m = MOST_M
    computes = {
        "prune_weight": "one launch for each weight, which is read once",
        "prune_grad_output": "one read, one write; rescaling reads twice",
    }

    def unavailable(self) -> str:
        return sources.triton_missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands) or self._refuses_form(operands):
            return reason
        on_gpu = operands.device.type == "cuda"
        return "" if on_gpu else f"{NO_GAIN}Triton's interpreter saves no time"

    def _refuses_form(self, operands: PruneWeight | PruneMaps) -> str:
        if isinstance(operands, PruneWeight):
            return _refuses_weight(operands.weight, operands.dtype)
        _, m, kind, rescale = operands.pattern
        if operands.across is not None:
            return "it prunes along channels alone"
        return _refuses_grad_output(m, kind, rescale, operands.maps.dtype)

    def cost(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed draws as without Triton; compiled code fuses PyTorch's operators."""
        return 2.0 if operands.draws or torch.compiler.is_compiling() else 0.5

    def prune_weight(self, operands: PruneWeight) -> Callable[[PruneWeight], PrunedWeight]:
        groups, dtype, patterns = operands.groups, operands.dtype, operands.strategy.weight_patterns
        return from_kernel(operands, lambda weight: prune_weight(weight, groups, patterns, dtype))

    def prune_grad_output(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        pattern, groups = operands.pattern, operands.groups
        return lambda o: prune_grad_output(o.maps, *pattern, groups, o.seed())


register_backend(PruneByTriton())
