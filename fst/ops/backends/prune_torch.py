"""Pruning by PyTorch's operators, as the rules say it: on any device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import PrunedWeight, is_of_weight
from fst.rules.masks import apply_mask
from fst.rules.two_of_four import takes, two_of_four


class PruneByTorch(Backend):
    """The rules' own methods; S(W) and S(Wᵀ) of 2:4 from one selection."""

    name = "torch"
    computes = {
        "prune_weight": "PyTorch's own operators",
        "prune_grad_output": "PyTorch's own operators",
        "prune_columns": "PyTorch's own operators",
    }

    def prune_weight(self, operands: PruneWeight) -> Callable[[PruneWeight], PrunedWeight]:
        return _prune_weight

    def prune_grad_output(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        return lambda o: o.rule.prune_grad_output(o.maps, o.gemm, o.groups, o.generator, o.memory)

    def prune_columns(self, operands: PruneMaps) -> Callable[[PruneMaps], Tensor]:
        return lambda o: o.rule.prune_columns(o.maps, o.generator)


def _prune_weight(operands: PruneWeight) -> PrunedWeight:
    weight, strategy, groups = operands.weight, operands.strategy, operands.groups
    dtype, generator, mask = operands.dtype, operands.generator, operands.mask
    dense = output = weight if weight.dtype == dtype else weight.to(dtype)
    rule, own = strategy.grad_input, None
    if mask is None and _is_two_of_four_twice(operands):
        mask, own = two_of_four(weight, (1, 0))
    elif mask is None and strategy.output is not None:
        mask = strategy.output.weight_mask(weight, "output", groups, generator)
    if strategy.output is not None:
        assert mask is not None
        if strategy.output.changes_values:
            output = strategy.output.weight_values(weight, mask, groups).to(dtype)
        else:
            output = apply_mask(dense, mask)
    if not is_of_weight(rule):
        return PrunedWeight(output, dense, mask)
    if rule.as_output:
        return PrunedWeight(output, output, mask)
    if own is None:
        source = weight
        if rule.after_output:
            assert mask is not None
            source = apply_mask(weight, mask)
        own = rule.weight_mask(source, "grad_input", groups, generator)
    return PrunedWeight(output, apply_mask(output if rule.after_output else dense, own), mask)


def _is_two_of_four_twice(operands: PruneWeight) -> bool:
    """True if `two_of_four` can select for both GEMMs at once.

    If each convolution group has a multiple of four output channels, no group of four crosses a
    border, and `groups` can be ignored.
    """
    weight = operands.weight
    whole = len(weight) // operands.groups % 4 == 0
    twice = operands.strategy.weight_patterns == (2, 4, 2, 4)
    return whole and twice and takes(weight, (0, 1))


register_backend(PruneByTorch())
