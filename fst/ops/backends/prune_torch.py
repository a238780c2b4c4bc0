"""Pruning by PyTorch's operators, as the rules say it: on any device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fst.backends.registry import Backend, register_backend
from fst.ops.operands import PruneMaps, PruneWeight
from fst.ops.prune import PrunedWeight, is_of_weight
from fst.rules.masks import apply_mask


class PruneByTorch(Backend):
    """The rules' own methods."""

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
    rule = strategy.grad_input
    if mask is None and strategy.output is not None:
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
    source = weight
    if rule.after_output:
        assert mask is not None
        source = apply_mask(weight, mask)
    own = rule.weight_mask(source, "grad_input", groups, generator)
    return PrunedWeight(output, apply_mask(output if rule.after_output else dense, own), mask)


register_backend(PruneByTorch())
