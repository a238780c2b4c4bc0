"""The share of a model's weights, and of its multiply-adds, that lies in N:M groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.text import table
from fst.layers.calls import LayerCall, called_on, each_call, in_eval_mode
from fst.rules.rule import WeightGroups

NOT_N_M = "converted, weights not N:M"
NOT_CALLED = "converted, but not called in evaluation"


@dataclass(frozen=True)
class CoveredWeight:
    """A weight of a convolution or linear layer, and how much of it is N:M.

    Attributes:
        name: of the parameter.
        shape: (Cout, Cin/groups, ...); () where a lazy layer does not know it yet.
        groups: the N:M that it has, or should have; None where there is none.
        reason: why nothing of it counts as N:M, whatever ``groups`` are; "" where they tell.
        density: share of non-zero elements; None where nobody has looked.
        offence: the first group with more than N non-zero elements, in words, or None.
        is_checked: whether its values were asked to be N:M.
        multiply_adds: of the layer in a forward pass; None where unknown.
    """

    name: str
    shape: tuple[int, ...]
    groups: WeightGroups | None = None
    reason: str = ""
    density: float | None = None
    offence: str | None = None
    is_checked: bool = True
    multiply_adds: int | None = None

    @property
    def ok(self) -> bool:
        """True if no group has more than N non-zero elements."""
        return self.offence is None

    @property
    def size(self) -> int:
        """Its elements; 0 where a lazy layer does not know them yet."""
        return math.prod(self.shape) if self.shape else 0

    @property
    def inside(self) -> int:
        """Elements in full groups of M, of which the pattern prunes some."""
        if self.groups is None or self.reason or self.offence:
            return 0
        return inside_groups(self.shape, *self.groups)

    @property
    def is_exempt(self) -> bool:
        """True if all of its groups are shorter than M, as in depthwise layers."""
        return self.groups is not None and _group(self.shape, self.groups) < self.groups.m

    @property
    def pattern(self) -> str:
        """ "N:M", with " along im2col" where its groups run so; "" where nothing is N:M."""
        return _named(self.groups) if self.groups is not None and self.inside else ""

    @property
    def label(self) -> str:
        """Its row in the table of a model."""
        if self.reason or self.groups is None:
            return self.reason or NOT_N_M
        if self.offence:
            return f"not {_named(self.groups)}" + ("" if self.is_checked else ", not checked")
        if self.is_exempt:
            return exempt(self.groups.m)
        return self.pattern or f"{_named(self.groups)}, which prunes nothing"


@dataclass(frozen=True)
class Coverage:
    """The weights of a model's convolutions and linear layers, and which of them are N:M.

    Biases, and weights in modules of other types, are in no number. ``str()`` is a table of how
    many there are of each kind, `by_weight` one with a row for each.
    """

    weights: tuple[CoveredWeight, ...] = ()

    @property
    def parameters(self) -> float:
        """Share of the weights' elements in full N:M groups, 0 to 1."""
        return _share(sum(w.inside for w in self.weights), sum(w.size for w in self.weights))

    @property
    def multiply_adds(self) -> float | None:
        """Share of the multiply-adds of the layers that were called; None where nobody counted."""
        if all(w.multiply_adds is None for w in self.weights):
            return None
        inside = sum(_macs_inside(w) for w in self.weights)
        return _share(inside, sum(w.multiply_adds or 0 for w in self.weights))

    def by_weight(self) -> str:
        """Table of the weights: shape, density, and what each is."""
        rows = []
        for w in self.weights:
            density = "-" if w.density is None else f"{w.density:.3f}"
            what = f"{w.label}: {w.offence}" if w.offence else w.label
            rows.append((w.name, "x".join(map(str, w.shape)), density, what))
        return table(("weight", "shape", "density", "pattern"), rows)

    def __str__(self) -> str:
        is_counted = self.multiply_adds is not None
        rows: dict[str, list[float]] = {}  # layers, elements, multiply-adds
        for weight in self.weights:
            macs, inside = float(weight.multiply_adds or 0), _macs_inside(weight)
            rest = weight.size - weight.inside
            parts = [(weight.label, 1, weight.inside or rest, inside if weight.inside else macs)]
            if weight.inside and rest and weight.groups is not None:
                parts.append((exempt(weight.groups.m), 0, rest, macs - inside))
            for label, *numbers in parts:
                row = rows.setdefault(label, [0, 0, 0])
                row[:] = (a + b for a, b in zip(row, numbers, strict=True))
        totals = [sum(row[i] for row in rows.values()) for i in range(3)]
        header = ["weights", "layers", "parameters", "share"]
        header += ["multiply-adds of the example", "share"] if is_counted else []
        cells = []
        ordered = sorted(rows.items(), key=lambda row: not row[0][0].isdigit())  # N:M first
        for label, (layers, size, macs) in [*ordered, ("all", totals)]:
            shown = [label, layers, f"{size:,}", f"{_share(size, totals[1]):.1%}"]
            shown += [f"{macs:,.0f}", f"{_share(macs, totals[2]):.1%}"] if is_counted else []
            cells.append(shown)
        return table(header, cells)


def exempt(m: int) -> str:
    """The label of what lies in groups of fewer than ``m``."""
    return f"exempt: groups of fewer than {m}"


def _named(groups: WeightGroups) -> str:
    along = "" if groups.group_order == "channel" else f" along {groups.group_order}"
    return f"{groups.n}:{groups.m}{along}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _macs_inside(weight: CoveredWeight) -> float:
    return (weight.multiply_adds or 0) * _share(weight.inside, weight.size)


def _group(shape: Sequence[int], groups: WeightGroups) -> int:
    """Elements along the axis that is cut into groups."""
    return math.prod(shape[1:]) if groups.group_order == "im2col" else shape[1]


def inside_groups(shape: Sequence[int], n: int, m: int, group_order: str = "channel") -> int:
    """Elements of a weight (Cout, Cin/groups, ...) in full groups of m along ``group_order``.

    None at all where n == m, which prunes nothing.
    """
    axis = _group(shape, WeightGroups(n, m, group_order))
    return math.prod(shape) // axis * (axis // m * m) if n < m and axis else 0


def gemm_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of convolutions and linear layers by their names in the state_dict.

    Those of `nn.MultiheadAttention` are among them, whose input projections are bare Parameters.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        names: tuple[str, ...] = ()
        if isinstance(module, _ConvNd | nn.Linear | nn.Bilinear):
            names = ("weight",)
        elif isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        for own in names:
            weight = getattr(module, own)
            if weight is not None:
                found[f"{name}.{own}" if name else own] = weight
    return found


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight; () while it is lazy."""
    return () if isinstance(weight, UninitializedParameter) else tuple(weight.shape)


def inputs_of(example_input: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a call, of which there may be one.

    Raises:
        TypeError: ``example_input`` is neither a tensor nor a tuple.
    """
    if not isinstance(example_input, Tensor | tuple):
        raise TypeError(
            f"example_input is a {type(example_input).__name__}; it must be a tensor (N, ...) or "
            "a tuple of inputs."
        )
    return example_input if isinstance(example_input, tuple) else (example_input,)


@torch.no_grad()
def multiply_adds(model: nn.Module, example_input: Tensor | tuple[Any, ...]) -> dict[str, int]:
    """Multiply-adds with each of `gemm_weights` in one forward pass in eval mode.

    What has no weight (attention's products of tokens) is not among them.

    Args:
        model: on the device of ``example_input``; it is left as it is.
        example_input: one batch, (N, ...), or a tuple of several inputs.

    Raises:
        TypeError: ``example_input`` is neither a tensor nor a tuple.
        ValueError: the model cannot be called on it.
    """
    inputs = inputs_of(example_input)
    found = dict.fromkeys(gemm_weights(model), 0)

    def count(call: LayerCall) -> None:
        layer, prefix = call.layer, f"{call.name}." if call.name else ""
        if isinstance(layer, nn.MultiheadAttention):
            for key, macs in _of_attention(call).items():
                found[prefix + key] += macs
            return
        maps = call.input if isinstance(layer, _ConvTransposeNd) else call.output
        weight = layer.weight
        assert isinstance(weight, Tensor)
        found[f"{prefix}weight"] += maps.numel() // weight.shape[0] * weight.numel()

    kinds = (_ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)
    with in_eval_mode(model), each_call(model, kinds, count):
        called_on(model, inputs)
    return found


def _of_attention(call: LayerCall) -> dict[str, int]:
    """Multiply-adds of the projections in a call of `nn.MultiheadAttention`."""
    layer, named = call.layer, (call.named.get(name) for name in ("query", "key", "value"))
    assert isinstance(layer, nn.MultiheadAttention)
    operands = [*call.given, *(x for x in named if x is not None)][:3]
    tokens = [x.numel() // x.shape[-1] for x in operands]
    square = layer.embed_dim**2
    found = {"out_proj.weight": tokens[0] * square}
    if layer.in_proj_weight is not None:
        return found | {"in_proj_weight": sum(tokens) * square}
    for part, count in zip("qkv", tokens, strict=True):
        found[f"{part}_proj_weight"] = count * getattr(layer, f"{part}_proj_weight").numel()
    return found
