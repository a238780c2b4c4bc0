"""Shares of zeros in the operands of a product, which decide between backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fst.backends.record import STEPS, Record, nearest_eighth
from fst.ops import cpp
from fst.rules.strategy import Strategy

BLOCKS = 16  # of 4096 numbers, which a count looks at


@cpp.operator(like=lambda maps: maps.new_empty(2, dtype=torch.int64), tensors=1)
def nonzeros(maps: Tensor, every: int) -> Callable[[Tensor], Tensor]:
    """Count the numbers that are not zero, and those that were looked at: (2,) int64.

    Args:
        maps: (N, C, H, W), contiguous or channels_last.
        every: 1 looks at all numbers, n at every n-th block of 4096 neighbours.
    """
    cpp.check_operands(maps=maps)
    if every < 1:
        raise ValueError(f"every={every} must be at least 1.")
    run, form = cpp.kernel("fst_count_nonzeros"), (cpp.KINDS[maps.dtype], maps.numel(), every)

    def count(maps: Tensor) -> Tensor:
        result = torch.empty(2, dtype=torch.int64)
        run(maps.data_ptr(), *form, result.data_ptr())
        return result

    return count


def counted(tensor: Tensor) -> float:
    """The share of zeros of (N, C, H, W), by a sample; 0 where no kernel can use them."""
    if not tensor.numel() or cpp.refuses(tensor):
        return 0.0
    every = max(1, tensor.numel() // (BLOCKS * 4096))
    kept, seen = nonzeros.plan(tensor, every)(tensor).tolist()
    return 1 - kept / seen


def share_of_zeros(operand: str, tensor: Tensor, record: Record, *, trains: bool) -> float:
    """The share of zeros of an operand in eighths, counted where the record does not know it.

    Args:
        operand: its name in the record.
        trains: False for a call that is no part of a training step, and leaves no trace: a resumed
            run may evaluate less often.
    """
    eighth = record.shares.get(operand)
    if eighth is None:
        share = counted(tensor)
        eighth = nearest_eighth(share)
        if trains:
            record.count(operand, share)
    return eighth / STEPS


def share_by_rule(strategy: Strategy) -> float:
    """At least so many zeros are in S(W) of an N:M strategy: inside torch.compile, where nothing is
    counted.

    A literal: a number that is computed of others would become a symbol of one layer's graph, and
    another layer could not compare it.
    """
    rule = strategy.output
    groups = None if rule is None or rule.changes_values else rule.weight_groups
    if groups is None:
        return 0.0
    if 8 * groups.n <= groups.m:
        return 0.875
    if 4 * groups.n <= groups.m:
        return 0.75
    if 2 * groups.n <= groups.m:
        return 0.5
    return 0.25 if 4 * groups.n <= 3 * groups.m else 0.0
