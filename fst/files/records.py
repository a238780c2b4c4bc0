"""The record in a folded layer of the N:M pattern that its weight must have.

It is plain data, and stands where `nn.Module.state_dict` takes a module's version from for the
metadata of the tensors: `torch.save` keeps it there, and convolutions and linear layers load
any version. So neither a folded model nor its state_dict needs FST to be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fst.basics.values import is_integer
from fst.files.checkpoint import state_dict_in
from fst.rules.masks import check_pattern
from fst.rules.nm import GROUP_ORDERS
from fst.rules.rule import WeightGroups

KEY = "fst"
RECORDS = "fst.json"  # a .pt2 file's extra file, and the other formats' metadata
Records = dict[str, WeightGroups | None]  # name of a converted weight -> its groups, if it has any


class Stored(NamedTuple):
    """The contents of a file.

    Attributes:
        weights: its tensors by name, in (Cout, Cin/groups, ...) where the file tells.
        records: which of them must be N:M, where the file says so.
        layers: those of convolutions and linear layers; None where names and shapes tell alone.
        unread: name -> why a weight's values cannot be checked.
        lost: names of records whose weights are not in the file.
        others: names of other state_dicts in it.
    """

    weights: dict[str, Tensor]
    records: Records
    layers: frozenset[str] | None = None
    unread: Mapping[str, str] = {}
    lost: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def outputs_first(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's (Cin, Cout/groups, ...) as (Cout, Cin/groups, ...)."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def leave_record(layer: nn.Module, groups: WeightGroups | None) -> None:
    """Record that ``layer`` was converted, and the groups of its weight; None: no N:M."""
    layer.__dict__["_version"] = _version(groups)


def as_metadata(records: Records) -> dict[str, Any]:
    """The metadata of a state_dict whose layers have these records."""
    return {
        name.rpartition(".")[0]: {"version": _version(groups)} for name, groups in records.items()
    }


def _version(groups: WeightGroups | None) -> dict[str, Any]:
    return {KEY: None if groups is None else groups._asdict()}


def drop_record(layer: nn.Module) -> None:
    """Remove the record of a layer."""
    layer.__dict__.pop("_version", None)


def records_of(model: nn.Module) -> Records:
    """The records of a model's folded layers."""
    found = {name: module._version for name, module in model.named_modules()}
    return _records(found)


def records_in(checkpoint: Any, path: object = "the checkpoint") -> Records:
    """The records in the metadata of a state_dict, or of the one in a checkpoint.

    Raises:
        ValueError: one is damaged.
    """
    metadata = getattr(state_dict_in(checkpoint), "_metadata", None)
    entries = metadata.items() if isinstance(metadata, Mapping) else ()
    found = {name: entry.get("version") for name, entry in entries if isinstance(entry, Mapping)}
    try:
        return _records({name.removeprefix("module."): version for name, version in found.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def give_records(model: nn.Module, records: Records) -> None:
    """Copy the records of a file to the layers of a plain model that was loaded from it."""
    layers = dict(model.named_modules())
    for name, groups in records.items():
        if layer := layers.get(name.rpartition(".")[0]):
            leave_record(layer, groups)


def as_text(records: Mapping[str, Any]) -> str:
    """The records, as formats write them that hold strings and tensors."""
    return json.dumps({name: None if n is None else n._asdict() for name, n in records.items()})


def from_text(text: str | None) -> Records:
    """The records in text of `as_text`; none for None.

    Raises:
        ValueError: the text is anything else.
    """
    try:
        found = json.loads(text or "{}").items()
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"the record {text!r:.80} of its weights is damaged.") from error
    return {name: groups_of(name, entry) for name, entry in found}


def _records(versions: Mapping[str, Any]) -> Records:
    return {
        f"{name}.weight".lstrip("."): groups_of(name, version[KEY])
        for name, version in versions.items()
        if isinstance(version, Mapping) and KEY in version
    }


def groups_of(name: str, entry: object) -> WeightGroups | None:
    """The groups that a record of a weight says.

    Raises:
        ValueError: it is damaged.
    """
    if entry is None:
        return None
    if isinstance(entry, Mapping) and entry.keys() == set(WeightGroups._fields):
        groups = WeightGroups(**entry)
        if is_integer(groups.n) and is_integer(groups.m) and groups.group_order in GROUP_ORDERS:
            check_pattern(groups.n, groups.m)
            return groups
    raise ValueError(f"the record {entry!r:.80} of the weight of {name!r} is damaged.")
