"""A depthwise layer of a packed model and the 1x1 layers around it, which one kernel can compute.

One after the other, each of them writes maps to memory that the next one reads, which takes longer
than multiplying. The kernel keeps some rows at a time in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fst.inference.packed import PackedConv2d, PackedLayer
from fst.inference.plans import Plans
from fst.ops.backends.depthwise import is_depthwise
from fst.ops.geometry import LINEAR
from fst.ops.packed import PackedChain


class Chain:
    """Layers that follow each other: one is depthwise, a 1x1 layer may come before and behind it.

    The last one is called for all of them.

    Attributes:
        layers: two or three.
        plans: compute them.
    """

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self.layers, self.plans = tuple(layers), Plans()
        self._place = [is_depthwise_layer(layer) for layer in layers].index(True)

    def __call__(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The last layer's output; the residual is added to it before its activation.

        Raises:
            UsageError: a layer is in training mode, a gradient is required, or a tensor is not on
                the CPU.
        """
        for layer in self.layers:
            layer.refuse_misuse(input, residual)
        if torch.compiler.is_compiling():
            return self._unfused(input, residual)
        weights = [layer.packed_weight(input) for layer in self.layers]
        around, place = [None, *weights, None], self._place
        layers = (weights[place], around[place], around[place + 2])
        operands = PackedChain(input, residual, *layers, unfused=self._unfused)
        return self.plans.run(operands, weights)

    def _unfused(self, input: Tensor, residual: Tensor | None) -> Tensor:
        *others, last = self.layers
        for layer in others:
            input = layer.multiply(input, None)
        return last.multiply(input, residual)


def is_depthwise_layer(layer: nn.Module) -> bool:
    """True for a layer that can be the middle of a chain."""
    return isinstance(layer, PackedConv2d) and is_depthwise(layer.weight, layer.groups)


def is_pointwise_layer(layer: nn.Module) -> bool:
    """True for a layer that can come before or behind one: 1x1, of one group."""
    is_one = isinstance(layer, PackedConv2d) and layer.kernel_size == (1, 1)
    return is_one and layer.geometry == LINEAR
