"""S(W) once for many calls, where the caller guarantees that the weights stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fst.layers.modules import converted_layers
from fst.layers.remembered import FrozenBlock


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Prune each layer's weight once, in its first call, while the block runs.

    For evaluation, or around the micro-batches of one step: the caller guarantees that the weights
    stay as they are. The optimizer's step raises there; for inference fold the model instead.
    However the block ends, it ends for every layer: also for those that were folded, replaced or
    removed meanwhile.

    Raises:
        ValueError: ``model`` has no converted layer, or is frozen already.
    """
    states = [layer.transient for layer in converted_layers(model).values()]
    if any(transient.frozen is not None for transient in states):
        raise ValueError(f"{type(model).__name__} is frozen already: fst.frozen does not nest.")
    block = FrozenBlock()
    try:
        for transient in states:
            transient.frozen_block = block
        yield
    finally:
        block.end()
