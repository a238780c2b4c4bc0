"""Shares of zeros in the operands of a product, which decide between backends."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends import choice
from fst.backends.record import STEPS, nearest_eighth
from fst.ops import cpp
from fst.ops.operands import Zeros
from fst.rules.strategy import Strategy

BLOCKS = 16  # of 4096 numbers, which a count looks at


def share_of_zeros(operand: str, tensor: Tensor, *, trains: bool = True) -> float:
    """The share of zeros of an operand, in eighths; 0 where no kernel can use them.

    A layer counts them in every 16th call, see `fst.backends.Record.share`.

    Args:
        operand: its name in the layer's record.
        trains: False for a call that is no part of a training step.
        tensor: (N, C, H, W).
    """
    if not tensor.numel() or cpp.missing() or cpp.refuses_lists(tensor):
        return 0.0
    record = choice.current_record()

    def count() -> float:
        every = max(1, tensor.numel() // (BLOCKS * 4096))
        kept, seen = cpp.nonzeros(tensor, every).tolist()
        return 1 - kept / seen

    if record is None:
        return nearest_eighth(count()) / STEPS
    return record.share(operand, count, trains=trains)


def zeros_of_output(strategy: Strategy, input: Tensor, weight: Tensor, *, trains: bool) -> Zeros:
    """The shares of zeros in S(W) and X."""
    if not strategy.skips_zeros:
        return Zeros()
    if torch.compiler.is_compiling():
        return Zeros(weight=share_by_rule(strategy))
    of_weight = share_of_zeros("weight", weight, trains=trains)
    return Zeros(of_weight, share_of_zeros("input", input, trains=trains))


def share_by_rule(strategy: Strategy) -> float:
    """The share of zeros in S(W) of an N:M strategy, in eighths: inside torch.compile, where
    nothing is counted.
    """
    rule = strategy.output
    groups = None if rule is None or rule.changes_values else rule.weight_groups
    share = 0.0 if groups is None else 1 - groups.n / groups.m
    return nearest_eighth(share) / STEPS


def may_count(strategy: Strategy) -> bool:
    """True where zeros are counted: not for the control, nor inside torch.compile."""
    return strategy.skips_zeros and not torch.compiler.is_compiling()
