"""The weights that `fst.verify` checks: of a model, a state_dict or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.sharding import whole
from fst.files.records import Stored, outputs_first, records_of
from fst.files.weights import read_stored, stored_in
from fst.layers.coverage import gemm_weights
from fst.layers.modules import SparseLayer
from fst.rules.rule import WeightGroups

QUANTISED = "quantised, not checked"


class Weight(NamedTuple):
    """A weight, and what it is.

    Attributes:
        values: (Cout, Cin/groups, ...), as its layer multiplies by them.
        is_counted: it is that of a convolution or linear layer, as far as one can tell.
        is_checked: where nobody knows what was converted.
        groups: the N:M that it was converted to.
        owner: its layer, where there is a model.
        unread: why its values cannot be checked; "" where they can.
    """

    values: Tensor
    is_counted: bool
    is_checked: bool
    groups: WeightGroups | None = None
    owner: nn.Module | None = None
    unread: str = ""


def target_of(target: object) -> tuple[dict[str, Weight], Stored]:
    """The weights of a model, of a state_dict, or in a file; and the file's or state_dict's own.

    Raises:
        TypeError: it is none of these.
        ValueError: a file or a state_dict without weights, or a model with lazy layers.
        FileNotFoundError: no such file.
    """
    if isinstance(target, nn.Module):
        return _of_model(target), Stored({}, {})
    if not isinstance(target, Mapping | str | os.PathLike):
        raise TypeError(
            f"target is a {type(target).__name__}; it must be a module, a state_dict or a path."
        )
    stored = stored_in(target, "target") if isinstance(target, Mapping) else read_stored(target)
    return _of_stored(stored), stored


def _of_stored(stored: Stored) -> dict[str, Weight]:
    """In a state_dict an embedding's weight looks like that of a linear layer, and counts."""
    found = {}
    for name, value in stored.weights.items():
        unread = stored.unread.get(name, "")
        is_known = stored.layers is not None and name in stored.layers
        if _is_integer(value) and (is_known or "weight" in name.rpartition(".")[2]):
            unread = QUANTISED
        if value.dim() < 2 or not (value.is_floating_point() or unread):
            continue
        looks_so = value.dim() == 4 or bool(unread) or name.endswith("weight")
        is_counted = looks_so if stored.layers is None else is_known
        is_checked = is_counted and value.dim() == 4
        groups = stored.records.get(name)
        found[name] = Weight(value, is_counted, is_checked, groups, unread=unread)
    return found


def _of_model(model: nn.Module) -> dict[str, Weight]:
    """The weights of its layers, and its other tensors; each module by one name.

    The others are not checked by default, but where torch.jit hides what layers they belong to.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"target: {name!r} has no shape yet: run the model once, so that its lazy layers "
                "know theirs."
            )
    records = records_of(model)
    found = {name: _of_layer(w, records.get(name), None) for name, w in gemm_weights(model).items()}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        key = f"{prefix}weight"
        if isinstance(module, _ConvTransposeNd):
            values = outputs_first(whole(module.weight), module.groups)
            found[key] = found[key]._replace(values=values)
        if isinstance(module, SparseLayer):
            rule, values = module.current_strategy.output, module.effective_weight()
            groups = None if rule is None else rule.weight_groups
            found[key] = Weight(values, True, True, groups)
        if _is_quantised_layer(module):
            found[key] = _of_layer(module.weight(), None, module)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        is_hidden = isinstance(module, torch.jit.ScriptModule)
        for other, held in _of_stored(Stored(dict(own), {})).items():
            is_checked = held.is_checked and is_hidden
            entry = held._replace(is_checked=is_checked, is_counted=False, unread="")
            name_of = f"{prefix}{other}"
            found[name_of] = found.get(name_of, entry)._replace(owner=module)
    return found


def _of_layer(values: Tensor, groups: WeightGroups | None, owner: nn.Module | None) -> Weight:
    unread = QUANTISED if _is_integer(values) else ""
    return Weight(values, True, values.dim() == 4, groups, owner, unread)


def _is_quantised_layer(module: nn.Module) -> bool:
    """True for torch.ao's convolutions and linear layers, whose weight is a method."""
    is_known = type(module).__module__.startswith("torch.ao.nn.")
    is_gemm = hasattr(module, "out_channels") or hasattr(module, "out_features")
    return is_known and is_gemm and callable(module.weight)


def _is_integer(weight: Tensor) -> bool:
    """True for quantised values: an integer there stands for a number, and 0 need not mean zero."""
    return not (weight.is_floating_point() or weight.is_complex() or weight.dtype == torch.bool)
