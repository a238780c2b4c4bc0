"""N:M pruning of weights and of grad_output, by the Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fst.backends import sources
from fst.backends.registry import NO_GAIN, register_backend
from fst.basics.errors import UsageError
from fst.ops import cpp
from fst.ops.backends.prune_cpp import PruneByKernel, like_weight
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.operators import Planned

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_M = 8  # sorting larger groups takes most of the registers and seconds to compile


def _operator(
    like: Callable[..., Any], returns: str = "Tensor"
) -> Callable[[Callable[..., Callable[..., Any]]], Planned]:
    """Register a kernel of one tensor as ``torch.ops.fst.NAME``: see `Planned`."""
    return lambda plan: Planned(plan, like, 1, returns, ("cpu", "cuda"))


def _kernels(module: str) -> ModuleType:
    reason = sources.triton_missing()
    if reason:
        raise UsageError(f"the Triton kernels cannot run here: {reason}.")
    return sources.load(module)


def _on_its_device(run: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """The function, which launches on the tensor's device where there are several."""
    if not tensor.is_cuda or torch.cuda.device_count() == 1:
        return run
    device = tensor.device

    def on_it(*arguments: Any) -> Any:
        with torch.cuda.device(device):
            return run(*arguments)

    return on_it


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
) -> Callable[[Tensor], Tensor]:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.prune.prune_grad_output` does it.

    ``seed``: one int64 on the same device, for rule="random" only.

    Raises:
        ValueError: a rule or dtype that the kernels do not know, or no seed.
    """
    if reason := _refuses_grad_output(m, rule, rescale, grad_output.dtype):
        raise ValueError(f"the Triton kernels cannot prune grad_output: {reason}.")
    if rule == "random" and seed is None:
        raise ValueError("rule='random' needs seed=, an int64 tensor on the same device.")
    kernels = _kernels("prune_gradient")
    run = kernels.planned(grad_output, n, m, rule, rescale, groups)
    return _on_its_device(lambda grad_output: run(grad_output, seed), grad_output)


@_operator(like=like_weight, returns="list[Tensor]")
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
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
    kernels = _kernels("prune_weight")

    def job_of(weight: Tensor, results: Sequence[Tensor]) -> Any:
        output = results[0] if n_output else None
        grad_input = results[1 if n_output else 0] if n_grad_input else None
        return kernels.Job(weight, groups, output, grad_input, results[-1] if n_output else None)

    output = (n_output, m_output) if n_output else None
    grad_input = (n_grad_input, m_grad_input) if n_grad_input else None
    form = torch.empty_like(weight, device="meta")
    sample = job_of(weight, like_weight(form, patterns, dtype))
    run = kernels.planned(sample, output, grad_input)

    def prune(weight: Tensor) -> list[Tensor]:
        results = like_weight(weight, patterns, dtype)
        run(job_of(weight, results))
        return results

    return _on_its_device(prune, weight)


class PruneByTriton(PruneByKernel):
    """One launch for each operand."""

    name = "triton"
    most_m, of_weight, of_maps = MOST_M, prune_weight, prune_grad_output
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


register_backend(PruneByTriton())
