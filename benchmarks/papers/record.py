"""Record inputs and gradients of a model's convolutions in one step, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.selectors import selected
from fst.ops.arguments import padded_geometry
from fst.ops.geometry import Geometry


class Call(NamedTuple):
    """One call of a convolution: input (N, Cin, H, W), grad_output (N, Cout, P, Q), and the
    gradient that this call alone sends to its input (None where nothing before it is trained).
    """

    input: Tensor
    grad_output: Tensor
    grad_input: Tensor | None


def padded_input(layer: nn.Conv2d, input: Tensor) -> tuple[Tensor, Geometry]:
    """The input of a convolution, padded as far as its `Geometry` does not say it."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    options = (layer.stride, padding, layer.dilation, layer.groups)
    return padded_geometry(input, layer.weight, *options)


@dataclass
class LayerRecord:
    """A convolution's calls in one step, and the gradient of its weight, if it has one."""

    layer: nn.Conv2d
    calls: list[Call]
    grad_weight: Tensor | None


@dataclass
class StepRecord:
    """One step: convolutions in the order of their first call, and every parameter's gradient."""

    layers: dict[str, LayerRecord]
    gradients: dict[str, Tensor]


def conv_names(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Names of the 2-D convolutions that ``patterns`` select as in `fst.convert` (None: all).

    Raises:
        ValueError: the model has none, or a pattern matches none.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no 2-D convolution.")
    chosen = layers if patterns is None else selected("layers", patterns, layers, "convolution")
    return [name for name in layers if name in chosen]


def record_step(
    model: nn.Module,
    loss: Callable[[], Tensor],
    scale: float = 1.0,
) -> StepRecord:
    """Run forward and backward once.

    Args:
        model: the names of layers and parameters are those in this module.
        loss: computes the scalar to derive.
        scale: the loss is multiplied by it for the backward pass, the gradients are divided by it
            (float16 needs it).

    Returns:
        The convolutions that a gradient reached.
    """
    calls: dict[str, list[dict[str, Tensor]]] = {}

    def keep(entry: dict[str, Tensor], key: str) -> Callable[[Tensor], None]:
        return lambda gradient: entry.__setitem__(key, unscaled(gradient.detach()))

    def unscaled(gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)  # float16 would lose it again
        return gradient.to(wide) / scale

    def before(name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        entry = {"input": inputs[0].detach()}
        calls.setdefault(name, []).append(entry)
        if not inputs[0].requires_grad:
            return inputs
        alias = inputs[0].view_as(inputs[0])  # its gradient is that of this call alone
        alias.register_hook(keep(entry, "grad_input"))
        return (alias, *inputs[1:])

    def after(name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(keep(calls[name][-1], "grad_output"))

    layers = {name: model.get_submodule(name) for name in conv_names(model)}
    handles = []
    for name, layer in layers.items():
        handles += [
            layer.register_forward_pre_hook(lambda _, inputs, name=name: before(name, inputs)),
            layer.register_forward_hook(lambda _, __, output, name=name: after(name, output)),
        ]
    try:
        model.zero_grad(set_to_none=True)
        (loss() * scale).backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = {
        name: parameter.grad.detach() / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    records = {}
    for name, entries in calls.items():
        seen = [
            Call(entry["input"], entry["grad_output"], entry.get("grad_input"))
            for entry in entries
            if "grad_output" in entry
        ]
        if seen:
            records[name] = LayerRecord(layers[name], seen, gradients.get(f"{name}.weight"))
    model.zero_grad(set_to_none=True)
    return StepRecord(records, gradients)
