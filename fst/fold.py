"""From a model in training back to plain layers that hold S(W)."""

from __future__ import annotations

import copy

from torch import nn

from fst.modules import sparse_layers


def fold(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Plain `nn.Conv2d` and `nn.Linear` holding S(W): the same outputs as ``model`` in eval mode.

    Args:
        model: a converted model; it is left as it is unless ``inplace``.
        inplace: change ``model`` itself; its dense weights are lost.

    Raises:
        ValueError: no layer of ``model`` is converted.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer: nothing to fold.")
    weights = {name: layer.effective_weight() for name, layer in layers.items()}
    if not inplace:
        model = copy.deepcopy(model)
        layers = sparse_layers(model)
    for name, layer in layers.items():
        layer.densify(weights[name])
    return model
