"""Noticing, once per step, that the gradient of a weight has arrived."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from fst.layers.modules import SparseLayer


class _GradientWatcher:
    """Runs when the gradient of a weight has arrived: once per backward pass, whatever the number
    of calls and layers that share the weight.
    """

    def __init__(self) -> None:
        self.layers: list[weakref.ref[SparseLayer]] = []
        self._last: tuple[int, int, int] | None = None

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        layers = [layer for layer in (ref() for ref in self.layers) if layer is not None]
        self.layers.clear()
        if gradient is None or not layers:
            return
        # Another backward pass of the same step only adds to the gradient it left behind.
        place = (weight._version, gradient.data_ptr())
        accumulates = self._last == (*place, gradient._version - 1)
        if not accumulates:
            layers[0].add_decay(gradient)
        self._last = (*place, gradient._version)
        for layer in layers:
            layer.gradient_arrived(new_step=not accumulates)


_WATCHERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def watch_gradient(layer: SparseLayer) -> None:
    """Tell ``layer`` when the gradient of its weight has arrived in the next backward pass."""
    watcher = _WATCHERS.get(layer.weight)
    if watcher is None:
        watcher = _WATCHERS[layer.weight] = _GradientWatcher()
        layer.weight.register_post_accumulate_grad_hook(watcher)
    if not any(ref() is layer for ref in watcher.layers):
        watcher.layers.append(weakref.ref(layer))
