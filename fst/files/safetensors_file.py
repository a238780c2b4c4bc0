"""Files of safetensors: the state_dict, whole or with N:M weights as values and positions.

A compressed weight NAME is two tensors. Its axis of groups (the input channels, or Cin·kh·kw of
im2col) is filled up with zeros to whole groups of m. Of each group ``NAME.values`` has n values, in
order, as (Cout, groups, n, rest); ``NAME.positions`` has their positions within the group, each as
ceil(log2 m) bits, the most significant first, in the same order, as bytes. A group of fewer than n
non-zero values has zeros among them. The metadata's `COMPRESSED` has the shape, n, m and the order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.extras import extra_named
from fst.files.options import Inputs, Options
from fst.files.records import RECORDS, Stored, as_text, from_text, groups_of, records_of
from fst.rules.rule import WeightGroups

COMPRESSED = "fst.compressed.json"  # metadata: name of a weight -> shape and groups
PARTS = (".values", ".positions")


def write(model: nn.Module, inputs: Inputs, options: Options, path: Path) -> None:
    """Write the state_dict, and the records as metadata."""
    with extra_named():
        from safetensors.torch import save_file
    records, layouts = records_of(model), {}
    # clones: the format has no shared tensors, and a model's may be tied
    tensors = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    for name, groups in records.items() if options.compressed else ():
        weight = tensors.get(name)
        if groups is None or weight is None:
            continue
        parts = compressed(weight, groups)
        if sum(part.nbytes for part in parts) < weight.nbytes:
            del tensors[name]
            tensors |= {name + end: part for end, part in zip(PARTS, parts, strict=True)}
            layouts[name] = {"shape": list(weight.shape), **groups._asdict()}
    said = {"format": "pt", RECORDS: as_text(records)}
    save_file(tensors, path, said | ({COMPRESSED: json.dumps(layouts)} if layouts else {}))


def read(path: Path) -> Stored:
    """The state_dict, compressed weights as they were.

    Raises:
        ValueError: a compressed weight is damaged.
    """
    with extra_named():
        from safetensors import safe_open
    with safe_open(path, "pt") as file:
        said = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for name, layout in json.loads(said.get(COMPRESSED, "{}")).items():
        try:
            values, positions = (tensors.pop(name + end) for end in PARTS)
            groups = groups_of(name, {key: layout[key] for key in WeightGroups._fields})
            assert groups is not None  # of an entry that is a dict
            tensors[name] = _restored(values, positions, layout["shape"], groups)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"the compressed weight {name!r} is damaged: {error}") from error
    return Stored(tensors, from_text(said.get(RECORDS)))


def compressed(weight: Tensor, groups: WeightGroups) -> tuple[Tensor, Tensor]:
    """Values and positions of a weight (Cout, Cin/groups, ...) whose every group has N:M."""
    n, m, order = groups
    flat = (
        weight.flatten(1)[..., None] if order == "im2col" else weight.reshape(*weight.shape[:2], -1)
    )
    grouped = F.pad(flat, (0, 0, 0, -flat.shape[1] % m)).unflatten(1, (-1, m))
    # the non-zero ones first, each in its order, then zeros of the same group
    index = (grouped == 0).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :n].sort(dim=2).values
    shifts = torch.arange(_bits(m) - 1, -1, -1)
    bits = (index[..., None] >> shifts & 1).flatten()
    whole = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    packed = (whole << torch.arange(7, -1, -1)).sum(1).to(torch.uint8)
    return grouped.gather(2, index).contiguous(), packed


def _restored(
    values: Tensor, positions: Tensor, shape: Sequence[int], groups: WeightGroups
) -> Tensor:
    n, m, order = groups
    filters, axis, rest = shape[0], shape[1], math.prod(shape[2:])
    if order == "im2col":
        axis, rest = axis * rest, 1
    expected = (filters, math.ceil(axis / m), n, rest)
    if tuple(values.shape) != expected:
        raise ValueError(f"its values have the shape {tuple(values.shape)}, not {expected}")
    size = math.ceil(values.numel() * _bits(m) / 8)
    if positions.dtype != torch.uint8 or positions.numel() != size:
        raise ValueError(f"its positions are no {size} bytes")
    bits = (positions[:, None] >> torch.arange(7, -1, -1) & 1).flatten()
    bits = bits[: values.numel() * _bits(m)].view(*expected, _bits(m)).long()
    index = (bits << torch.arange(_bits(m) - 1, -1, -1)).sum(-1)
    if (index >= m).any() or (index.diff(dim=2) <= 0).any():
        raise ValueError("its positions are not those of groups, in order")
    grouped = values.new_zeros(filters, expected[1], m, rest).scatter_(2, index, values)
    return grouped.flatten(1, 2)[:, :axis].reshape(shape)


def _bits(m: int) -> int:
    """Bits of a position in a group of m."""
    return (m - 1).bit_length()
