"""Training calls of which all but the tensors is known, so that they cost little.

To ask a small layer what it knows of a call takes longer than to prune its weight. So a layer keeps
the answers while all its products are dense, see `fst.ops.conv.known_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import choice
from fst.layers.weights import PrunableWeight
from fst.ops.conv import Call, convolve_pruned
from fst.ops.prune import PrunedWeight, prepared_pruning


class PreparedCall(NamedTuple):
    """A layer's call with one form of input.

    Attributes:
        fixed: all that the call depends on, besides the tensors and its key.
        prune: S(W) and S(Wᵀ) of the weight as a convolution's.
    """

    fixed: tuple[Any, ...]
    call: Call
    prune: Callable[[Tensor], PrunedWeight]

    def fits(self, layer: PrunableWeight, where: tuple[Any, ...]) -> bool:
        """True if nothing but the tensors has changed."""
        trains = layer.training and layer.passing.frozen is None
        return trains and self.fixed == _fixed(layer, where)

    def run(self, layer: PrunableWeight, input: Tensor) -> Tensor:
        """The layer's output; what a step needs of the call is remembered."""
        own = layer._parameters["weight"]  # a module's own look-up takes longer
        assert own is not None  # it fits
        weight = layer._as_conv(own)
        with choice.recording(layer.state.record, is_dense=True):
            pruned = self.prune(weight.detach())
            if self.call.strategy.decay and own.requires_grad:
                layer.passing.decay_mask = pruned.mask  # the decay waits for the optimizer's step
            return convolve_pruned(input, weight, layer._parameters["bias"], pruned, self.call)


def _fixed(layer: PrunableWeight, where: tuple[Any, ...]) -> tuple[Any, ...]:
    weight = layer._parameters["weight"]
    assert weight is not None  # its call is known
    form = weight.shape, weight.stride(), weight.device
    return layer.strategy, where, layer.conv_groups, *form


def prepare(
    layer: PrunableWeight,
    input: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    call: Call,
    where: tuple[Any, ...],
) -> PreparedCall | None:
    """The layer's next calls like this one; None where more than its tensors may change.

    Args:
        weight: the layer's, as a convolution's.
        dtype: of the products.
    """
    strategy, record = layer.strategy, layer.state.record
    moves = strategy.schedule is not None or strategy.keeps_masks or strategy.has_memory
    if moves or strategy.prunes_at_random or not layer.multiplies_parameter:
        return None
    if not input.dtype == weight.dtype == dtype or layer.passing.frozen is not None:
        return None
    decision = record.decisions.get("prune_weight")
    backend = "" if decision is None else decision.backend
    prune = prepared_pruning(weight.detach(), strategy, layer.conv_groups, backend)
    return None if prune is None else PreparedCall(_fixed(layer, where), call, prune)
