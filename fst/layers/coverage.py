"""The weights that a model multiplies with, their groups, and their multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.layers.calls import LayerCall, called_on, each_call, in_eval_mode
from fst.rules.rule import WeightGroups

NOT_CALLED = "converted, but not called in evaluation"


def group_length(shape: Sequence[int], groups: WeightGroups) -> int:
    """Elements along the axis that is cut into groups."""
    return math.prod(shape[1:]) if groups.group_order == "im2col" else shape[1]


def inside_groups(shape: Sequence[int], n: int, m: int, group_order: str = "channel") -> int:
    """Elements of a weight (Cout, Cin/groups, ...) in full groups of m along ``group_order``.

    None at all where n == m, which prunes nothing.
    """
    axis = group_length(shape, WeightGroups(n, m, group_order))
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
    """The inputs of a call as a tuple.

    Raises:
        TypeError: ``example_input`` is neither a tensor nor a tuple of inputs.
    """
    if not isinstance(example_input, Tensor | tuple):
        raise TypeError(
            f"example_input is a {type(example_input).__name__}; it must be a tensor (N, ...) or "
            "a tuple of inputs."
        )
    if isinstance(example_input, tuple) and all(isinstance(size, int) for size in example_input):
        raise TypeError(f"example_input={example_input}: give a tensor, as torch.randn(*sizes).")
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
