"""Layers for inference alone: a plan for each form of the input computes the product.

`fst.pack` turns plain layers into these by changing their class. The parameters stay those of the
plain layer; the folded weight, its lists and the plans are made again once a parameter changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fst.backends.record import STEPS, nearest_eighth
from fst.basics.errors import UsageError
from fst.inference.checks import is_watched, refuses_padding
from fst.inference.plans import Plans
from fst.ops.backends.packed import LANES
from fst.ops.backends.zeros_weight import zeros_output
from fst.ops.cpp import like_output
from fst.ops.geometry import LINEAR, Geometry
from fst.ops.packed import (
    Finished,
    Folded,
    Packed,
    PackedWeight,
    by_library,
    finish,
    finished,
    to_nchw,
)
from fst.ops.zeros import counted

NUMBERS = (int, float, torch.SymInt)  # a tuple, which compilers of torch 2.7 and 2.8 know


class PackedLayer(nn.Module):
    """Base class of `PackedConv2d` and `PackedLinear`.

    Attributes:
        numbers_of: returns the attributes that decide what a layer computes.
        layer_name: in the model.
        cast: dtype of the products where it is not the weight's; or None.
        norm: batch norm that became part of the layer in the graph of its model; or None.
        activation: one of ACTIVATIONS that became part of it.
        follows: names of all that became part of it.
        plans: compute the layer alone.
        chain: computes the layer together with those before it; or None.
    """

    numbers_of: attrgetter[tuple[Any, ...]] = attrgetter("cast", "activation")
    weight: nn.Parameter
    bias: nn.Parameter | None
    layer_name: str
    cast: torch.dtype | None
    norm: nn.Module | None
    activation: str
    follows: tuple[str, ...]
    plans: Plans
    chain: Any
    _packed: PackedWeight | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        return self.cast or self.weight.dtype

    @property
    def geometry(self) -> Geometry:
        """Of the convolution; `LINEAR` of a linear layer."""
        return LINEAR

    def forward(
        self, input: Tensor, residual: Tensor | float | None = None, fused: bool = False
    ) -> Tensor:
        """The plain layer's output; or, in a graph, activation(norm(W * input + bias) + residual).

        Args:
            input: of the first layer of the chain that ends here, if one does.
            fused: True of a graph, which does not call what became part of the layer.

        Raises:
            UsageError: the layer is in training mode, a gradient is required, a tensor is not on
                the CPU, or the layer has become one that cannot be packed.
        """
        is_own = self.follows or self.chain or self._parameters.get("weight") is None
        if not fused and (is_own or is_watched(input)):
            self.refuse_misuse(input)
            if self.cast is None:
                return super().forward(input)
            return by_library(input, self.fold(None), self.geometry)
        if isinstance(residual, NUMBERS):  # as in conv(x) + x.size(0)
            residual = input.new_full((), residual)  # type: ignore[arg-type]
        return (self.chain or self.multiply)(input, residual)

    def multiply(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The layer alone, with what became part of it."""
        on_cpu = input.is_cpu and (residual is None or residual.is_cpu)
        if self.training or torch.is_grad_enabled() or not on_cpu:
            self.refuse_misuse(input, residual)
        if torch.compiler.is_compiling():
            return self._compiled(input, residual)
        weight = self.packed_weight(input)
        return self.plans.run(Packed(input, residual, weight), weight)

    def refuse_misuse(self, *operands: Tensor | None) -> None:
        """Raise UsageError in training mode, where a gradient is required, or off the CPU."""
        tensors = [x for x in (*operands, self.weight, self.bias) if isinstance(x, Tensor)]
        required = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if self.training or required:
            raise UsageError(
                f"layer {self.layer_name!r} is packed, for inference alone, and "
                f"{'is in training mode' if self.training else 'is asked for a gradient'}: train "
                "the model that fst.pack was given, call eval() on the packed one, and run it "
                "within torch.inference_mode() or torch.no_grad()."
            )
        if not all(x.device.type == "cpu" for x in tensors):
            devices = " and ".join(sorted({str(x.device) for x in tensors}))
            raise UsageError(
                f"layer {self.layer_name!r} is packed, for a CPU, and got tensors on "
                f"{devices}: move the packed model and its input to the CPU, or use the model "
                "that fst.pack was given."
            )

    def packed_weight(self, input: Tensor) -> PackedWeight:
        """Operands that the tensors of the layer and of its batch norm make, as they are now."""
        numbers, norm, packed = self.numbers_of(self), self.norm, self._packed
        tensors: list[Tensor | None] = [*self._parameters.values()]
        if norm is not None:
            tensors += norm._parameters.values()
            tensors += norm._buffers.values()
            numbers += (norm.eps,)
        versions = _versions_of(tensors)
        if packed is None or packed.versions != versions or packed.numbers != numbers:
            self.refuse_misuse(input)
            if reason := refuses_padding(self):
                raise UsageError(f"layer {self.layer_name!r} is packed, and has now {reason}.")
            with torch.inference_mode(False), torch.no_grad():
                memory = [x if x is None else x.detach() for x in tensors]
                folded, seen = self.fold(norm), (numbers, versions, tensors, memory)
                zeros = nearest_eighth(counted(folded.weight)) / STEPS
                packed = PackedWeight(folded, self.geometry, self.activation, zeros, *seen)
            self._packed = packed
        return packed

    def _is_unchanged(self) -> bool:
        """True if the tensors that `packed_weight` has seen are as they were."""
        packed = self._packed
        return packed is not None and packed.versions == _versions_of(packed.tensors)

    def _runs(self) -> str:
        """The backend of the latest decision."""
        return self.plans.decision.backend

    # for torch.compile, which calls them once
    _is_unchanged._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _runs._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def fold(self, norm: nn.Module | None) -> Folded:
        """The weight and the bias, batch norm included."""
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        if norm is not None:
            of: Any = norm
            scale = (of.running_var + of.eps).rsqrt()
            scale = scale if of.weight is None else scale * of.weight.detach()
            shift = -of.running_mean if bias is None else bias - of.running_mean
            weight, bias = weight * scale.view(-1, 1, 1, 1), shift * scale
            bias = bias if of.bias is None else bias + of.bias.detach()
        weight = weight.to(self.dtype)
        weight = weight[:, :, None, None] if weight.dim() == 2 else weight
        exact = None if bias is None else bias.float().contiguous()
        return Folded(weight, None if bias is None else bias.to(self.dtype), exact)

    def _compiled(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """For compilers and torch.export, whose programs keep the weight and its lists."""
        geometry, runs = self.geometry, self._runs()
        packed = self._packed if self._is_unchanged() else None
        folded = self.fold(self.norm) if packed is None else packed.folded
        maps, lanes = to_nchw(input, geometry), LANES.get(runs)
        if lanes is None or maps is None:
            return finish(by_library(input, folded, geometry), residual, self.activation)
        lists = None if packed is None else packed.lists.get(runs)

        def plan(_: Tensor | None, activation: int) -> Finished:
            weight, bias, rest = folded.weight, folded.exact_bias, (*geometry, activation, lanes)
            return lambda maps, added: zeros_output(maps, weight, lists, bias, added, *rest)

        like = like_output(maps, folded.weight, *geometry)
        run = finished(plan, like, input, residual, geometry, self.activation)
        return run(input, residual)

    def _apply(self, *arguments: Any, **named: Any) -> nn.Module:
        before = self.weight.dtype
        applied = super()._apply(*arguments, **named)
        self.cast = self.cast if self.weight.dtype == before else None
        return applied

    def __setattr__(self, name: str, value: Any) -> None:
        """A new tensor makes a new weight, for torch.export too."""
        if isinstance(value, Tensor):
            self._packed = None
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Lists are for one kind of processor, and are made again."""
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        """As the plain layer's, with what was made part of it."""
        return ", ".join([super().extra_repr(), *self.follows])


class PackedConv2d(PackedLayer, nn.Conv2d):  # type: ignore[misc]  # parameters are never None
    """A convolution of `fst.pack`."""

    numbers_of = attrgetter("cast", "stride", "padding", "dilation", "groups", "padding_mode")

    @property
    def geometry(self) -> Geometry:
        """Of the convolution, with symmetric padding."""
        padding = self.padding
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            padding = (0, 0) if padding == "valid" else (reach[0] // 2, reach[1] // 2)
        stride, dilation = self.stride, self.dilation
        return Geometry(
            (stride[0], stride[1]),
            (padding[0], padding[1]),
            (dilation[0], dilation[1]),
            self.groups,
        )


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[misc]
    """A linear layer of `fst.pack`: see `PackedLayer`."""


def _versions_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Which tensors they are, in which state; one that counts no changes is never the same."""
    return [
        x if x is None else (id(x), object() if x.is_inference() else x._version, x.data_ptr())
        for x in tensors
    ]


def pack_layer(layer: nn.Module, name: str) -> PackedLayer:
    """Turn a plain layer that can be packed into a packed one; its parameters stay."""
    layer.__class__ = PackedConv2d if isinstance(layer, nn.Conv2d) else PackedLinear
    assert isinstance(layer, PackedLayer)  # its class has just become one
    layer.__dict__.update(layer_name=name, cast=None, norm=None, activation="", follows=())
    layer.__dict__.update(plans=Plans(), chain=None, _packed=None)
    return layer


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """The packed layers of a model, by name."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, PackedLayer)}
