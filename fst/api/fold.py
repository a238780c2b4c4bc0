"""A plain model from a converted one: its weights are S(W)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fst.api.selection import shared_parameters
from fst.basics.sharding import LOAD, refuse_sharded
from fst.files.records import leave_record
from fst.layers.modules import sparse_layers


def fold(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Plain `nn.Conv2d` and `nn.Linear` holding S(W): the outputs of ``model`` in eval mode.

    Outputs are equal up to rounding where a backend leaves zeros out.

    A layer of a library's own class becomes that class again. A class that computes its weight
    (timm's StdConv2d) would compute another weight from S(W), so its layers become plain too.
    Layers that share a Parameter share the folded one. The plain layers, and the metadata of the
    state_dict, record which N:M their weights are, for `fst.verify` and `fst.export`.

    Args:
        model: a converted model; it is left as it is unless ``inplace``. Of a wrapper (DDP,
            AveragedModel) the result is the wrapper; fold its ``module`` for a plain model.
        inplace: change ``model`` itself; its dense weights are lost.

    Raises:
        ValueError: no layer of ``model`` is converted, or the weight of one is computed from other
            parameters, or is shared with a layer that computes with other values of it.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer: nothing to fold.")
    refuse_sharded(model, "fold", LOAD)
    for name, layer in layers.items():
        if layer._parameters.get("weight") is None:
            raise ValueError(
                f"layer {name!r}: its weight is computed from other parameters, which would not "
                "hold S(W): call torch.nn.utils.parametrize.remove_parametrizations, "
                "remove_weight_norm, remove_spectral_norm or prune.remove first."
            )
    weights = {name: layer.effective_weight() for name, layer in layers.items()}
    _check_ties(model, weights)
    if not inplace:
        model = copy.deepcopy(model)
    for name, layer in sparse_layers(model).items():
        rule = layer.current_strategy.output
        layer.densify(weights[name])
        leave_record(layer, None if rule is None else rule.weight_groups)
    return model


def _check_ties(model: nn.Module, folded: Mapping[str, Tensor]) -> None:
    """Raise ValueError where layers share a Parameter and compute with different values of it."""
    for users in shared_parameters(model):
        values = [folded.get(name) if key == "weight" else None for name, key in users]
        first = next((value for value in values if value is not None), None)
        if first is None or all(v is not None and torch.equal(v, first) for v in values):
            continue
        names = " and ".join(repr(f"{name}.{key}".lstrip(".")) for name, key in users)
        raise ValueError(
            f"{names} are one Parameter, of which they compute with different values: folded, it "
            "could not stay one. Give each layer a Parameter of its own, or convert all of them "
            "with one strategy."
        )
