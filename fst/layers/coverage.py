"""What share of a model's weights, and of its multiply-adds, lies in N:M groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.text import table
from fst.layers.calls import LayerCall, each_call, in_eval_mode

NOT_N_M = "converted, weights not N:M"
NOT_CALLED = "converted, but not called in evaluation"


class CoveredWeight(NamedTuple):
    """A weight of a convolution or linear layer.

    Attributes:
        name: of the parameter.
        size: its elements; 0 where a lazy layer does not know them yet.
        inside: how many of them lie in full N:M groups.
        label: the row of the table that it belongs to.
        multiply_adds: of the layer in a forward pass; None where unknown.
    """

    name: str
    size: int
    inside: int
    label: str
    multiply_adds: int | None = None


@dataclass(frozen=True)
class Coverage:
    """The weights of a model's convolutions and linear layers, and which of them are N:M.

    Biases, and weights in modules of other types, are in no number. ``str()`` is a table.
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

    def __str__(self) -> str:
        is_counted = self.multiply_adds is not None
        rows: dict[str, list[float]] = {}  # layers, elements, multiply-adds
        for weight in self.weights:
            macs, inside = weight.multiply_adds or 0, _macs_inside(weight)
            rest = weight.size - weight.inside
            parts = [(weight.label, 1, weight.inside or rest, inside if weight.inside else macs)]
            if weight.inside and rest:
                parts.append((exempt(weight.label.rpartition(":")[2]), 0, rest, macs - inside))
            for label, *numbers in parts:
                row = rows.setdefault(label, [0, 0, 0])
                row[:] = (a + b for a, b in zip(row, numbers, strict=True))
        totals = [sum(row[i] for row in rows.values()) for i in range(3)]
        header = ["weights", "layers", "parameters", "share"]
        header += ["multiply-adds", "share"] if is_counted else []
        cells = []
        ordered = sorted(rows.items(), key=lambda row: not row[0][0].isdigit())  # N:M first
        for label, (layers, size, macs) in [*ordered, ("all", totals)]:
            shown = [label, layers, f"{size:,}", f"{_share(size, totals[1]):.1%}"]
            shown += [f"{macs:,.0f}", f"{_share(macs, totals[2]):.1%}"] if is_counted else []
            cells.append(shown)
        return table(header, cells)


def exempt(m: int | str) -> str:
    """The label of what lies in groups of fewer than ``m``."""
    return f"exempt: groups of fewer than {m}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _macs_inside(weight: CoveredWeight) -> float:
    return (weight.multiply_adds or 0) * _share(weight.inside, weight.size)


def inside_groups(shape: Sequence[int], n: int, m: int, group_order: str = "channel") -> int:
    """Elements of a weight (Cout, Cin/groups, ...) in full groups of m along ``group_order``.

    None at all where n == m, which prunes nothing.
    """
    axis = math.prod(shape[1:]) if group_order == "im2col" else shape[1]
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


def size_of(weight: Tensor) -> int:
    """Elements of a weight; 0 while it is lazy."""
    return 0 if isinstance(weight, UninitializedParameter) else weight.numel()


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
        positions = maps.numel() // layer.weight.shape[0]
        found[f"{prefix}weight"] += positions * layer.weight.numel()

    kinds = (_ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)
    with in_eval_mode(model), each_call(model, kinds, count):
        model(*inputs)
    return found


def _of_attention(call: LayerCall) -> dict[str, int]:
    """Multiply-adds of the projections in a call of `nn.MultiheadAttention`."""
    layer, named = call.layer, (call.named.get(name) for name in ("query", "key", "value"))
    operands = [*call.given, *(x for x in named if x is not None)][:3]
    tokens = [x.numel() // x.shape[-1] for x in operands]
    square = layer.embed_dim**2
    found = {"out_proj.weight": tokens[0] * square}
    if layer.in_proj_weight is not None:
        return found | {"in_proj_weight": sum(tokens) * square}
    for part, count in zip("qkv", tokens, strict=True):
        found[f"{part}_proj_weight"] = count * getattr(layer, f"{part}_proj_weight").numel()
    return found
