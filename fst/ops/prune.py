"""Operands as a strategy prunes them: S(W) and S(Wᵀ), and grad_output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import dispatch
from fst.basics.errors import UsageError
from fst.ops import cpp, triton
from fst.ops.arguments import UNTRACEABLE
from fst.rules.masks import apply_mask, remove_kept
from fst.rules.rule import Pattern, Rule
from fst.rules.strategy import Strategy
from fst.rules.two_of_four import takes, two_of_four


class PrunedWeight(NamedTuple):
    """The weight as each GEMM sees it, and the mask behind S(W) (None where output is dense)."""

    output: Tensor
    grad_input: Tensor
    mask: Tensor | None


def residual(weight: Tensor, mask: Tensor) -> Tensor:
    """W − S(W), towards zero of which SR-STE's decay pulls (Zhou et al. 2021, Eq. 9)."""
    return remove_kept(weight, mask)


def prune_weight(
    weight: Tensor,
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
) -> PrunedWeight:
    """S(W) and S(Wᵀ) of ``strategy``, selected on ``weight`` as stored and then cast to ``dtype``.

    ``mask`` replaces that of the output GEMM, where one is kept for several steps.
    """
    weight = weight.detach()
    if strategy.output is None and not _is_of_weight(strategy.grad_input):
        dense = weight if weight.dtype == dtype else weight.to(dtype)
        return PrunedWeight(dense, dense, None)
    if torch.jit.is_tracing():
        raise UsageError(UNTRACEABLE)
    candidates: dict[str, Callable[[], PrunedWeight]] = {
        "torch": lambda: _prune_with_torch(weight, strategy, groups, dtype, generator, mask)
    }
    patterns = kernel_patterns(strategy) if mask is None else None
    if patterns is not None:
        numbers = (*patterns[0], *patterns[1])
        from_kernel = functools.partial(_from_kernel, weight, strategy, dtype)
        if cpp.takes_weight(weight, dtype):  # the default where it has been built
            by_cpp = cpp.prune_weight
            candidates = {
                cpp.BACKEND: lambda: from_kernel(by_cpp(weight, groups, numbers, dtype)),
                **candidates,
            }
        if triton.takes_weight(weight, dtype):
            by_triton = triton.prune_weight
            candidates["triton"] = lambda: from_kernel(by_triton(weight, groups, numbers, dtype))
    rules = (strategy.output, strategy.grad_input)
    drawn = any(rule is not None and rule.is_random for rule in rules)
    options = (*map(str, rules), groups, str(dtype))
    return dispatch.compute("prune_weight", candidates, (weight,), options, tunable=not drawn)


def _is_of_weight(rule: Rule | None) -> bool:
    return rule is not None and rule.operand == "weight"


def _prune_with_torch(
    weight: Tensor,
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    mask: Tensor | None,
) -> PrunedWeight:
    dense = output = weight if weight.dtype == dtype else weight.to(dtype)
    rule, own = strategy.grad_input, None
    if mask is None and _is_two_of_four_twice(weight, strategy, groups):
        mask, own = two_of_four(weight, (1, 0))
    elif mask is None and strategy.output is not None:
        mask = strategy.output.weight_mask(weight, "output", groups, generator)
    if strategy.output is not None and strategy.output.changes_values:
        output = strategy.output.weight_values(weight, mask, groups).to(dtype)
    elif strategy.output is not None:
        output = apply_mask(dense, mask)
    if not _is_of_weight(rule):
        return PrunedWeight(output, dense, mask)
    if rule.as_output:
        return PrunedWeight(output, output, mask)
    if own is None:
        source = apply_mask(weight, mask) if rule.after_output else weight
        own = rule.weight_mask(source, "grad_input", groups, generator)
    return PrunedWeight(output, apply_mask(output if rule.after_output else dense, own), mask)


def _is_two_of_four_twice(weight: Tensor, strategy: Strategy, groups: int) -> bool:
    """Whether `two_of_four` can select for both GEMMs at once.

    Groups of four that a convolution's groups hold whole are the same without these.
    """
    whole = len(weight) // groups % 4 == 0
    return whole and kernel_patterns(strategy) == ((2, 4), (2, 4)) and takes(weight, (0, 1))


def kernel_patterns(strategy: Strategy) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(n, m) of S(W) and S(Wᵀ), n = 0 where that is not computed; None where no kernel can."""
    found = []
    for gemm in ("output", "grad_input"):
        rule = strategy.rule(gemm)
        if not _is_of_weight(rule) or (gemm == "grad_input" and rule.as_output):
            found.append((0, 1))
            continue
        pattern = rule.pattern(gemm)
        if pattern is None or pattern.rule != "magnitude" or pattern.m > triton.MOST_M:
            return None
        found.append((pattern.n, pattern.m))
    return (found[0], found[1]) if found[0][0] or found[1][0] else None


def _from_kernel(
    weight: Tensor, strategy: Strategy, dtype: torch.dtype, pruned: Sequence[Tensor]
) -> PrunedWeight:
    """``pruned``: S(W), S(Wᵀ) and the mask of S(W), as far as `kernel_patterns` names them."""
    output, grad_input = kernel_patterns(strategy)
    results = iter(pruned)
    first = next(results) if output[0] else weight.to(dtype)
    transposed = first
    if grad_input[0]:
        transposed = next(results)
    elif not _is_of_weight(strategy.grad_input):
        transposed = weight.to(dtype)
    return PrunedWeight(first, transposed, next(results, None))


def prune_grad_output(
    grad_output: Tensor,
    rule: Rule,
    gemm: str,
    groups: int,
    generator: torch.Generator | None,
    memory: dict[str, Any] | None = None,
) -> Tensor:
    """`Rule.prune_grad_output` by the backend that is chosen."""
    pattern = rule.pattern(gemm)

    def with_torch() -> Tensor:
        return rule.prune_grad_output(grad_output, gemm, groups, generator, memory)

    along = rule.pattern_of_positions(gemm)
    if along is not None:
        pruned = _along_positions("prune_grad_output", grad_output.flatten(2), along, with_torch)
        return pruned.reshape(grad_output.shape)
    if pattern is None:
        return with_torch()
    candidates = {"torch": with_torch}
    _, m, kind, rescale = pattern

    def with_kernel(prune: Callable[..., Tensor]) -> Tensor:
        seed = dispatch.seed(generator, grad_output.device) if rule.is_random else None
        return prune(grad_output, *pattern, groups, seed)

    if cpp.takes_grad_output(grad_output, m, kind, rescale):
        by_cpp = {cpp.BACKEND: lambda: with_kernel(cpp.prune_grad_output)}
        # What a seed draws must not depend on what has been built.
        candidates = candidates | by_cpp if rule.is_random else by_cpp | candidates
    if triton.takes_grad_output(m, kind, rescale, grad_output.dtype):
        candidates["triton"] = lambda: with_kernel(triton.prune_grad_output)
    return dispatch.compute(
        "prune_grad_output",
        candidates,
        (grad_output,),
        (*pattern, groups),
        tunable=not rule.is_random,
    )


def prune_columns(columns: Tensor, rule: Rule, generator: torch.Generator | None) -> Tensor:
    """`Rule.prune_columns` by the backend that is chosen."""

    def with_torch() -> Tensor:
        return rule.prune_columns(columns, generator)

    along = rule.pattern_of_positions("grad_weight")
    if along is None:
        return with_torch()
    return _along_positions("prune_columns", columns, along, with_torch)


def _along_positions(
    operation: str, rows: Tensor, pattern: Pattern, with_torch: Callable[[], Tensor]
) -> Tensor:
    """``rows`` (N, K, L) pruned by magnitude along L, which kernels take for the channels."""
    across = rows.transpose(1, 2).unsqueeze(3)
    candidates = {"torch": with_torch}
    if cpp.takes_grad_output(across, pattern.m, pattern.rule, pattern.rescale):

        def with_cpp() -> Tensor:
            pruned = cpp.prune_grad_output(across, *pattern, groups=1, seed=None)
            return pruned.squeeze(3).transpose(1, 2)

        candidates = {cpp.BACKEND: with_cpp, **candidates}
    return dispatch.compute(operation, candidates, (rows,), pattern)
