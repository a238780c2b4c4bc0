"""S(W) once for many calls, where somebody says that the weights stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fst.layers.modules import converted_layers


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within, each layer prunes its weight in its first call, and no more.

    For evaluation, or around the micro-batches of one step: the caller promises that the weights
    stay as they are. The optimizer's step within raises; for inference fold the model instead.

    Raises:
        ValueError: ``model`` has no converted layer, or is frozen already.
    """
    layers = list(converted_layers(model).values())
    if any(layer.run.frozen is not None for layer in layers):
        raise ValueError(f"{type(model).__name__} is frozen already: fst.frozen does not nest.")
    for layer in layers:
        layer.run.frozen = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.run.frozen = None
