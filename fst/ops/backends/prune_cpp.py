"""N:M pruning of weights and of grad_output, by the C++ kernels for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.operators import Planned
from fst.ops.prune import PrunedWeight, is_of_weight

MOST_M = 32
MOST_DRAWN_M = 8  # of random rules
RESULTS = {  # dtype of a weight -> dtypes into which it can be pruned
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


def like_weight(weight: Tensor, patterns: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Empty results of `prune_weight`."""
    n_output, _, n_grad_input, _ = patterns
    pruned = [torch.empty_like(weight, dtype=dtype) for n in (n_output, n_grad_input) if n]
    return [*pruned, torch.empty_like(weight, dtype=torch.bool)] if n_output else pruned


@cpp.operator(like=like_weight, tensors=1, returns="list[Tensor]")
def prune_weight(
    weight: Tensor, groups: int, patterns: Sequence[int], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """S(W), S(Wᵀ) and the mask of S(W), as `prune_triton.prune_weight` gives them."""
    cpp.check_operands(weight=weight)
    rows, channels, height, width = weight.shape
    cpp.check_groups(groups, rows)
    if dtype not in RESULTS.get(weight.dtype, ()):
        raise TypeError(f"weight has dtype {weight.dtype}, the result {dtype}.")
    n_output, m_output, n_grad_input, m_grad_input = patterns
    _check_pattern(n_output, m_output, least=0)
    _check_pattern(n_grad_input, m_grad_input, least=0)
    sizes = (rows // groups, channels, height * width, weight.stride(1) == 1, groups)
    numbers = cpp.integers(cpp.KINDS[weight.dtype], cpp.KINDS[dtype], *sizes, *patterns)
    run, is_empty = cpp.kernel("fst_prune_weight"), not weight.numel()

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
                *(weight.data_ptr(), numbers, None if first is None else first.data_ptr()),
                None if mask is None else mask.data_ptr(),
                None if second is None else second.data_ptr(),
            )
        return results

    return prune


@cpp.operator(like=lambda grad_output: torch.empty_like(grad_output), tensors=1)
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """grad_output (N, C, P, Q) pruned along C, as `prune_triton.prune_grad_output` does it."""
    cpp.check_operands(grad_output=grad_output)
    _check_pattern(n, m, 1, MOST_DRAWN_M if rule == "random" else MOST_M)
    samples, channels, height, width = grad_output.shape
    cpp.check_groups(groups, channels)
    if rule == "random" and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError("rule='random' needs seed=, one int64.")
    place = 2 if width == 1 else 3
    made = torch.empty_like(grad_output, device="meta")
    strides = [x.stride(axis) for x in (grad_output, made) for axis in (0, 1, place)]
    rescaled = rescale if rule == "magnitude_rescaled" else ""
    numbers = cpp.integers(
        *(cpp.KINDS[grad_output.dtype], samples, channels, height * width, *strides, n, m),
        *(rescaled == "group", rescaled == "sample_channel", groups),
    )
    run, is_empty = cpp.kernel("fst_prune_grad_output"), not grad_output.numel()
    draw = seed if rule == "random" else None

    def prune(grad_output: Tensor) -> Tensor:
        pruned = torch.empty_like(grad_output)
        if not is_empty:
            drawn = None if draw is None else draw.data_ptr()
            run(grad_output.data_ptr(), pruned.data_ptr(), numbers, drawn)
        return pruned

    return prune


def _check_pattern(n: int, m: int, least: int, most: int = MOST_M) -> None:
    if not least <= n <= m <= most:
        raise ValueError(f"n={n}, m={m}: {least} <= n <= m <= {most}.")


class PruneByKernel(Backend):
    """Base class of the pruning kernels for CPUs and GPUs: the form of operands and results.

    Attributes:
        most_m: the largest groups of weights.
        of_weight, of_maps: the operators.
    """

    most_m: ClassVar[int]
    of_weight: ClassVar[Planned]
    of_maps: ClassVar[Planned]

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        """The kernels know N:M by magnitude."""
        if isinstance(operands, PruneWeight):
            if operands.mask is not None:
                return "the mask is kept from an earlier step"
            patterns = operands.strategy.weight_patterns
            if patterns is None or max(patterns) > self.most_m:
                return f"it knows N:M by magnitude alone, M up to {self.most_m}"
        return ""

    def prune_weight(self, operands: PruneWeight) -> Callable[[PruneWeight], PrunedWeight]:
        groups, dtype, patterns = operands.groups, operands.dtype, operands.strategy.weight_patterns
        return from_kernel(operands, self.of_weight.plan(operands.weight, groups, patterns, dtype))

    def prune_grad_output(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        of_maps, pattern, groups = self.of_maps, operands.pattern, operands.groups
        if operands.across is not None:
            shape = operands.maps.shape
            prune = of_maps.plan(operands.across, *pattern, 1, None)
            return lambda o: prune(o.across).squeeze(3).transpose(1, 2).reshape(shape)
        if operands.draws:
            return lambda o: of_maps(o.maps, *pattern, groups, o.seed())
        prune = of_maps.plan(operands.maps, *pattern, groups, None)
        return lambda o: prune(o.maps)


class PruneByCpp(PruneByKernel):
    """One read, one write; both directions of a weight from one read."""

    name = cpp.BACKEND
    most_m, of_weight, of_maps = MOST_M, prune_weight, prune_grad_output
    computes = {
        "prune_weight": "C++ for CPUs: both directions from one read",
        "prune_grad_output": "C++ for CPUs: one read, one write; rescaling passes twice",
        "prune_columns": "C++ for CPUs: one read, one write",
    }

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: PruneWeight | PruneMaps) -> str:
        if reason := super().refuses(operands):
            return reason
        if isinstance(operands, PruneWeight):
            if operands.dtype not in RESULTS.get(operands.weight.dtype, ()):
                return f"it does not prune {operands.weight.dtype} into {operands.dtype}"
            return cpp.refuses(operands.weight)
        _, m, kind, rescale = operands.pattern
        most = MOST_DRAWN_M if kind == "random" else MOST_M
        if m > most:
            return f"groups of {m} are more than {most}"
        if kind == "magnitude_rescaled" and rescale == "channel":
            return "it does not rescale whole channels"
        return cpp.refuses(operands.maps if operands.across is None else operands.across)

    def cost(self, operands: PruneWeight | PruneMaps) -> float:
        """A seed must draw the same whether the kernels are compiled or not."""
        return 2.0 if operands.draws else 0.5

    prune_columns = PruneByKernel.prune_grad_output


def from_kernel(
    operands: PruneWeight, prune: Callable[[Tensor], Sequence[Tensor]]
) -> Callable[[PruneWeight], PrunedWeight]:
    """Pruning by a kernel that returns S(W), S(Wᵀ) and the mask of S(W), as far as the strategy's
    patterns name them.
    """
    dtype, patterns = operands.dtype, operands.strategy.weight_patterns
    assert patterns is not None
    prunes_output, is_own = patterns[0] > 0, patterns[2] > 0
    if prunes_output and (is_own or is_of_weight(operands.strategy.grad_input)):
        transposed = int(is_own)

        def both(operands: PruneWeight) -> PrunedWeight:
            results = prune(operands.weight)
            return PrunedWeight(results[0], results[transposed], results[-1])

        return both

    def run(operands: PruneWeight) -> PrunedWeight:
        results, dense = prune(operands.weight), operands.weight.to(dtype)
        if prunes_output:
            return PrunedWeight(results[0], dense, results[1])
        return PrunedWeight(dense, results[0], None)

    return run


register_backend(PruneByCpp())
