"""A depthwise layer of a packed model and the 1x1 layers around it, computed in one go.

One by one, each of them writes maps to memory that the next one reads, which takes longer than
multiplying. In one go some rows at a time stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fst.inference.choosing import Choice, Plan, Ways
from fst.inference.depthwise import PreparedDepthwise, is_depthwise, refuses_depthwise
from fst.inference.known import Known
from fst.inference.packed import PackedConv2d, PackedLayer
from fst.ops.geometry import LINEAR

APART, TOGETHER = "one by one", "in one go"


class Chain:
    """Layers that follow each other: one is depthwise, a 1x1 layer may come before and behind it.

    The last one is called for all of them.

    Attributes:
        layers: two or three.
        choice: how their product is computed.
    """

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self.layers = tuple(layers)
        self.choice = Choice(*(layer.choice.layers[0] for layer in layers))
        self.place = [is_depthwise_layer(layer) for layer in layers].index(True)

    def __call__(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The last layer's output; the residual is added to it before its activation.

        Raises:
            UsageError: a layer is in training mode, a gradient is required, or a tensor is not on
                the CPU.
        """
        for layer in self.layers:
            layer.refuse_misuse(input, residual)
        if torch.compiler.is_compiling():
            return self._apart(input, residual)
        known = tuple(layer.known(input) for layer in self.layers)
        plan = self.choice.plan(known, input, residual, partial(self._ways, known))
        return plan(input, residual)

    def _apart(self, input: Tensor, residual: Tensor | None) -> Tensor:
        *others, last = self.layers
        for layer in others:
            input = layer.multiply(input, None)
        return last.multiply(input, residual)

    def _ways(self, known: tuple[Known, ...], input: Tensor, residual: Tensor | None) -> Ways:
        ways: dict[str, Any] = {APART: lambda: self._apart}
        weight, geometry = known[self.place].folded.weight, known[self.place].geometry
        channels = known[0].folded.weight.shape[1] * known[0].geometry.groups
        refused = refuses_depthwise(input, channels, weight, geometry)
        if not refused and (residual is None or self.place < len(known) - 1):
            ways[TOGETHER] = partial(self._together, known, input, residual)
        return ways

    def _together(self, known: tuple[Known, ...], input: Tensor, residual: Tensor | None) -> Plan:
        layers: list[Any] = [
            layer.for_kernel(of) for layer, of in zip(self.layers, known, strict=True)
        ]
        before, middle, behind = [None, *layers, None][self.place : self.place + 3]
        product = PreparedDepthwise(input, middle, known[self.place].geometry, before, behind)
        like = product.like
        fits = residual is None or (
            (residual.shape, residual.dtype) == (like.shape, like.dtype)
            and residual.is_contiguous(memory_format=torch.channels_last)
        )
        return product if fits else self._apart


def is_depthwise_layer(layer: nn.Module) -> bool:
    """True for a layer that can be the middle of a chain."""
    return isinstance(layer, PackedConv2d) and is_depthwise(layer.weight, layer.groups)


def is_pointwise_layer(layer: nn.Module) -> bool:
    """True for a layer that can come before or behind one: 1x1, of one group."""
    is_one = isinstance(layer, PackedConv2d) and layer.kernel_size == (1, 1)
    return is_one and layer.geometry == LINEAR
