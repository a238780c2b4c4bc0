"""A depthwise layer of a packed model and the 1x1 layers around it, computed in one go.

One by one, each of them writes maps to memory that the next one reads, which takes longer than
multiplying. In one go some rows at a time stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fst.backends.timing import Timing, compare
from fst.inference.depthwise import Layer, PreparedDepthwise, is_depthwise, refuses_depthwise
from fst.inference.packed import Folded, PackedConv2d, PackedLayer
from fst.inference.sizes import (
    CHOOSING,
    MOST_MS,
    MOST_TIMED,
    REPEATS,
    Key,
    key_of,
    nearest,
    remember,
)
from fst.ops.geometry import LINEAR

APART, TOGETHER = "one by one", "in one go"


class Chain:
    """Layers that follow each other: one is depthwise, a 1x1 layer may come before and behind it.

    A layer ends one chain at most, by which it is called. Other layers of a chain are not called:
    their hooks do not run.

    Attributes:
        layers: one to three.
        times: of each input that was timed, milliseconds of APART and TOGETHER.
        chosen: of each input, whether the layers are computed in one go.
    """

    def __init__(self, layers: Sequence[PackedConv2d]) -> None:
        self.layers = tuple(layers)
        self.place = [is_depthwise_layer(layer) for layer in layers].index(True)
        self.times: dict[Key, dict[str, Timing]] = {}
        self.chosen: dict[Key, bool] = {}
        self.products: dict[Key, tuple[tuple[Folded, ...], PreparedDepthwise]] = {}

    def __call__(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The last layer's output; the residual is added to it before its activation.

        Raises:
            UsageError: a layer is in training mode, a gradient is asked for, or a tensor is not on
                the CPU.
        """
        for layer in self.layers[:-1]:
            layer.refuse_misuse(input)
        is_traced = torch.compiler.is_compiling() or type(input) is not Tensor
        if is_traced or self.layers[-1].only_library:
            return self.apart(input, residual)
        key = key_of(input, residual)
        together = self.chosen.get(key)
        if together is None:
            together = self._choose(key, input, residual)
        if together:
            product = self._product(key, input)
            if residual is None or _alike(residual, product.like):
                return product(input, residual)
        return self.apart(input, residual)

    def apart(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The layers one by one."""
        *others, last = self.layers
        for layer in others:
            input = layer.alone(input, None)
        return last.alone(input, residual)

    def forget(self) -> None:
        """Forget what was chosen, and made for it."""
        for known in (self.times, self.chosen, self.products):
            known.clear()

    def _choose(self, key: Key, input: Tensor, residual: Tensor | None) -> bool:
        with CHOOSING, torch.no_grad():
            if key not in self.chosen:
                if self._refuses(input, residual):
                    self.chosen[key] = False
                elif len(self.times) >= MOST_TIMED:
                    self.chosen[key] = self.chosen[nearest(self.times, key)]
                else:
                    self.chosen[key] = self._time(key, input, residual)
            return self.chosen[key]

    def _time(self, key: Key, input: Tensor, residual: Tensor | None) -> bool:
        product = self._product(key, input)
        if residual is not None and not _alike(residual, product.like):
            residual = None  # the next one may have the form that the kernel adds
        ways = {
            APART: lambda: self.apart(input, residual),
            TOGETHER: lambda: product(input, residual),
        }
        times = self.times[key] = compare(ways, REPEATS, input.device, warmup=1, most=MOST_MS)
        return times[TOGETHER].median < times[APART].median

    def _refuses(self, input: Tensor, residual: Tensor | None) -> str:
        if residual is not None and self.place == len(self.layers) - 1:
            return "a residual is added to the depthwise layer"
        depthwise, first = self.layers[self.place], self.layers[0]
        weight, groups = depthwise.folded().weight, first.groups
        channels = first.folded().weight.shape[1] * groups
        return refuses_depthwise(input, channels, weight, depthwise.geometry)

    def _product(self, key: Key, input: Tensor) -> PreparedDepthwise:
        folded = tuple(layer.folded() for layer in self.layers)
        made_of, product = self.products.get(key, ((), None))
        if product is None or not _same(made_of, folded):
            layers: list[Any] = [None, *map(_layer, self.layers, folded), None]
            before, middle, behind = layers[self.place : self.place + 3]
            with torch.inference_mode(False), torch.no_grad():
                geometry = self.layers[self.place].geometry
                product = PreparedDepthwise(input, middle, geometry, before, behind)
            remember(self.products, key, (folded, product))
        return product

    def __getstate__(self) -> dict[str, Any]:
        """Lists are for one kind of processor, and are made again."""
        return {**self.__dict__, "products": {}}


def is_depthwise_layer(layer: PackedLayer) -> bool:
    """True for a layer that can be the middle of a `Chain`."""
    return isinstance(layer, PackedConv2d) and is_depthwise(layer.weight, layer.groups)


def is_pointwise_layer(layer: PackedLayer) -> bool:
    """True for a layer that can come before or behind one: 1x1, of one group."""
    return (
        isinstance(layer, PackedConv2d) and layer.kernel_size == (1, 1) and layer.geometry == LINEAR
    )


def chain_depthwise(layers: Iterable[PackedLayer]) -> None:
    """Give each depthwise layer that is in no chain one of its own."""
    every = list(layers)
    chained = {id(of) for layer in every if layer.chain for of in layer.chain.layers}
    for layer in every:
        if is_depthwise_layer(layer) and id(layer) not in chained:
            layer.chain = Chain([layer])  # type: ignore[list-item]  # it is a convolution


def _layer(layer: PackedConv2d, folded: Folded) -> Layer:
    bias = None if folded.exact_bias is None else folded.exact_bias.contiguous()
    return Layer(folded.weight.contiguous(), bias, layer.activation)


def _same(some: Sequence[Folded], others: Sequence[Folded]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _alike(residual: Tensor, like: Tensor) -> bool:
    is_last = residual.is_contiguous(memory_format=torch.channels_last)
    return is_last and (residual.shape, residual.dtype) == (like.shape, like.dtype)
