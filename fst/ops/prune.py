"""Operands as a strategy prunes them: S(W) and S(Wᵀ), grad_output, columns of the input."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fst.backends.choice import compute
from fst.backends.record import Record
from fst.ops import cpp
from fst.ops.operands import PruneColumns, PruneMaps
from fst.rules.masks import remove_kept
from fst.rules.rule import Rule


class PrunedWeight(NamedTuple):
    """The weight as each GEMM sees it, and the mask behind S(W) (None where output is dense)."""

    output: Tensor
    grad_input: Tensor
    mask: Tensor | None


def add_residual(
    target: Tensor, weight: Tensor, mask: Tensor, factor: float, scale: Tensor | None = None
) -> None:
    """target += factor·scale·(W − S(W)) in place: SR-STE's decay (Zhou et al. 2021, Eq. 9).

    Args:
        mask: of S(W), True = kept; target, weight and mask have one shape.
        scale: one number on any device, which is not waited for; None: 1.
    """
    if scale is None and _kernel_adds(target, weight, mask):
        if count := target.numel():
            pointers = weight.data_ptr(), mask.data_ptr(), target.data_ptr()
            number = ctypes.c_double(factor)
            cpp.kernel("fst_add_residual")(*pointers, count, ctypes.addressof(number))
        torch.autograd.graph.increment_version(target)
        return
    pull = remove_kept(weight.detach(), mask)
    target.add_(pull if scale is None else pull * scale.to(pull.device), alpha=factor)


def _kernel_adds(target: Tensor, weight: Tensor, mask: Tensor) -> bool:
    """True if the C++ kernel takes these: float32 and bool, in one order of their elements.

    It is no operator, so no compiler can take it.
    """
    if torch.compiler.is_compiling() or cpp.missing():
        return False
    if not (target.is_cpu and weight.is_cpu and mask.is_cpu):
        return False
    if not (type(target) is type(mask) is Tensor and type(weight) in (Tensor, nn.Parameter)):
        return False
    if not (target.dtype == weight.dtype == torch.float32 and mask.dtype == torch.bool):
        return False
    if target.is_contiguous():
        return weight.is_contiguous() and mask.is_contiguous()
    if target.dim() != 4 or not target.is_contiguous(memory_format=cpp.LAST):
        return False
    return weight.is_contiguous(memory_format=cpp.LAST) and mask.is_contiguous(
        memory_format=cpp.LAST
    )


def is_of_weight(rule: Rule | None) -> TypeGuard[Rule]:
    """True for a rule that prunes the weight."""
    return rule is not None and rule.operand == "weight"


def prune_grad_output(
    grad_output: Tensor,
    rule: Rule,
    gemm: str,
    groups: int,
    generator: torch.Generator | None,
    memory: dict[str, Any] | None = None,
) -> Tensor:
    """`Rule.prune_grad_output` by the backend that is chosen."""
    operands = maps_to_prune(rule, gemm, groups)
    if operands is None:
        return rule.prune_grad_output(grad_output, gemm, groups, generator, memory)
    found: Tensor = compute(operands(grad_output, generator, memory))
    return found


def maps_to_prune(
    rule: Rule, gemm: str, groups: int
) -> Callable[[Tensor, torch.Generator | None, dict[str, Any] | None], PruneMaps] | None:
    """The operands of `Rule.prune_grad_output` as a function of grad_output, generator and memory;
    None where only the rule itself computes it.
    """
    along = rule.pattern_of_positions(gemm)
    pattern = rule.pattern(gemm) if along is None else along
    if pattern is None:
        return None

    def operands(
        grad_output: Tensor, generator: torch.Generator | None, memory: dict[str, Any] | None
    ) -> PruneMaps:
        across = None if along is None else _across(grad_output.flatten(2))
        return PruneMaps(grad_output, rule, gemm, groups, generator, memory, pattern, across)

    return operands


def prune_columns(
    columns: Tensor, rule: Rule, generator: torch.Generator | None, record: Record | None = None
) -> Tensor:
    """`Rule.prune_columns` by the backend that is chosen by the times in ``record``."""
    along = rule.pattern_of_positions("grad_weight")
    if along is None:
        return rule.prune_columns(columns, generator)
    maps = (columns, rule, "grad_weight", 1, generator, None, along, _across(columns))
    found: Tensor = compute(PruneColumns(*maps), record)
    return found


def _across(rows: Tensor) -> Tensor:
    """(N, K, L), pruned along L, as kernels see it that prune along the channels."""
    return rows.transpose(1, 2).unsqueeze(3)
