"""Layers for inference alone, which multiply by the library or by the zeros of their weight.

`fst.pack` turns plain layers into these by changing their class. The parameters stay those of the
plain layer, and what is made of them is made again once they change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.errors import UsageError
from fst.inference.checks import is_watched, refuses_padding
from fst.inference.choosing import Choice, Plan, Ways
from fst.inference.depthwise import Layer, PreparedDepthwise, refuses_depthwise
from fst.inference.known import Folded, Known, versions_of
from fst.ops.backends.zeros_weight import ACTIVATIONS, PreparedOutput, kept_output, refuses_zeros
from fst.ops.geometry import LINEAR, Geometry, empty_maps, is_channels_last, output_shape

LIBRARY, DEPTHWISE = "library", "depthwise kernel"
IMAGES, PIXELS = "zeros, over images", "zeros, over pixels"  # what a vector runs over
LANES = {IMAGES: 1, PIXELS: 2}  # as fst.ops.backends.zeros_weight numbers them
NUMBERS = (int, float, torch.SymInt)  # a tuple, which compilers of torch 2.7 and 2.8 know
LEAST_IMAGES = 4  # of a batch that can fill the lanes of a vector
ONEDNN: dict[str, tuple[str, list[float]]] = {  # its maximum would make 0 of NaN in ReLU and ReLU6
    "": ("none", []),
    "silu": ("swish", []),
    "hardswish": ("hardswish", []),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda maps: maps,
    "relu": F.relu_,
    "relu6": lambda maps: F.relu6(maps, inplace=True),
    "silu": lambda maps: F.silu(maps, inplace=True),
    "hardswish": lambda maps: F.hardswish(maps, inplace=True),
}


class PackedLayer(nn.Module):
    """Base class of `PackedConv2d` and `PackedLinear`.

    Attributes:
        cast: dtype of the products where it is not the weight's; or None.
        norm: batch norm that became part of the layer in the graph of its model; or None.
        activation: one of ACTIVATIONS that did.
        follows: what did, in words.
        choice: how the layer's product is computed.
        chain: computes the layer and those before it, in its stead; or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    cast: torch.dtype | None
    norm: nn.Module | None
    activation: str
    follows: tuple[str, ...]
    choice: Choice
    chain: Any
    _known: Known | None

    def become_packed(self, name: str) -> None:
        """Set the attributes."""
        self.__dict__.update(cast=None, norm=None, activation="", follows=())
        self.__dict__.update(choice=Choice(name), chain=None, _known=None)

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        return self.cast or self.weight.dtype

    @property
    def geometry(self) -> Geometry:
        """Of the convolution; a linear layer is one of 1x1."""
        return LINEAR

    def forward(
        self, input: Tensor, residual: Tensor | float | None = None, fused: bool = False
    ) -> Tensor:
        """The plain layer's output; or, in a graph, activation(norm(W * input + bias) + residual).

        Args:
            input: of the first layer of the chain that ends here, if one does.
            fused: whether the caller leaves out what became part of the layer.

        Raises:
            UsageError: the layer is in training mode, a gradient is required, a tensor is not on
                the CPU, or the layer has become one that cannot be packed.
        """
        is_own = self.follows or self.chain or self._parameters.get("weight") is None
        if not fused and (is_own or is_watched(input)):
            self.refuse_misuse(input)
            if self.cast is None:
                return super().forward(input)
            return self.library(input, self.fold(None))
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
        known = self.known(input)
        plan = self.choice.plan(known, input, residual, partial(self._ways, known))
        return plan(input, residual)

    def refuse_misuse(self, *operands: Tensor | None) -> None:
        """Raise UsageError in training mode, where a gradient is required, or off the CPU."""
        tensors = [x for x in (*operands, self.weight, self.bias) if isinstance(x, Tensor)]
        required = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if self.training or required:
            raise UsageError(
                f"layer {self.choice.layers[0]!r} is packed, for inference alone, and "
                f"{'is in training mode' if self.training else 'is asked for a gradient'}: train "
                "the model that fst.pack was given, call eval() on the packed one, and run it "
                "within torch.inference_mode() or torch.no_grad()."
            )
        if not all(x.device.type == "cpu" for x in tensors):
            devices = " and ".join(sorted({str(x.device) for x in tensors}))
            raise UsageError(
                f"layer {self.choice.layers[0]!r} is packed, for a CPU, and got tensors on "
                f"{devices}: move the packed model and its input to the CPU, or use the model "
                "that fst.pack was given."
            )

    def known(self, input: Tensor) -> Known:
        """Things made of the layer's tensors and the batch norm's, as they are now."""
        numbers, norm, known = self._numbers(), self.norm, self._known
        tensors: list[Tensor | None] = [*self._parameters.values()]
        if norm is not None:
            tensors += norm._parameters.values()
            tensors += norm._buffers.values()
            numbers += (norm.eps,)
        versions = versions_of(tensors)
        if known is None or known.versions != versions or known.numbers != numbers:
            self.refuse_misuse(input)
            if reason := refuses_padding(self):
                raise UsageError(
                    f"layer {self.choice.layers[0]!r} is packed, and has now {reason}."
                )
            with torch.inference_mode(False), torch.no_grad():
                memory = [x if x is None else x.detach() for x in tensors]
                known = Known(numbers, versions, tensors, memory, self.fold(norm), self.geometry)
            self._known = known
        return known

    def _is_known(self) -> bool:
        """True if the tensors that `known` has seen are unchanged."""
        known = self._known
        return known is not None and known.versions == versions_of(known.tensors)

    # for torch.compile, which calls it once
    _is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _numbers(self) -> tuple[Any, ...]:
        """Attributes that decide what the layer computes."""
        return (self.cast,)

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
        exact = None if bias is None else bias.float()
        return Folded(weight, None if bias is None else bias.to(self.dtype), exact)

    def _compiled(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """For compilers and torch.export, whose programs keep the weight and its lists."""
        maps, known = self.maps(input), self._known if self._is_known() else None
        folded = self.fold(self.norm) if known is None else known.folded
        lanes = LANES.get(self.choice.first)
        if lanes is None or maps is None:
            return finish(self.library(input, folded), residual, self.activation)
        lists = None if known is None else known.lists.get(self.choice.first)

        def multiply(maps: Tensor, added: Tensor | None, activation: int) -> Tensor:
            operands = (maps, folded.weight, lists, folded.exact_bias, added)
            return kept_output(*operands, *self.geometry, activation, lanes)

        shape = output_shape(maps.shape, folded.weight.shape, self.geometry)
        like = empty_maps(shape, maps, is_channels_last(maps))
        return self._by_zeros(multiply, like, input, residual)

    def _ways(self, known: Known, input: Tensor, residual: Tensor | None) -> Ways:
        ways: dict[str, Callable[[], Plan]] = {
            LIBRARY: partial(self._library_plan, known, input, residual is not None)
        }
        maps, weight, geometry = self.maps(input), known.folded.weight, known.geometry
        if maps is None:
            return ways
        if not refuses_zeros(maps, weight, geometry):
            for way in [IMAGES, PIXELS] if maps.shape[0] >= LEAST_IMAGES else [PIXELS]:
                ways[way] = partial(self._zeros_plan, known, maps, way)
        inside = weight.shape[1] * geometry.groups
        if residual is None and not refuses_depthwise(input, inside, weight, geometry):
            ways[DEPTHWISE] = lambda: PreparedDepthwise(input, self.for_kernel(known), geometry)
        return ways

    def for_kernel(self, known: Known) -> Layer:
        """The layer as the kernel of depthwise ones takes it."""
        weight, _, bias = known.folded
        bias = None if bias is None else bias.contiguous()
        return Layer(weight.contiguous(), bias, ACTIVATIONS.index(self.activation))

    def _library_plan(self, known: Known, input: Tensor, adds: bool) -> Plan:
        return lambda input, residual: finish(
            self.library(input, known.folded), residual, self.activation
        )

    def _zeros_plan(self, known: Known, maps: Tensor, way: str) -> Plan:
        weight, _, bias = known.folded
        product = PreparedOutput(maps, weight, bias, known.geometry, LANES[way])
        known.lists.setdefault(way, product.lists)
        return partial(self._by_zeros, product, product.like)

    def _by_zeros(
        self,
        multiply: Callable[[Tensor, Tensor | None, int], Tensor],
        like: Tensor,
        input: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        """activation(multiply + residual), as one product if the residual has the output's form."""
        maps, added = self.maps(input), None
        assert maps is not None  # or there is no product by zeros
        if residual is not None and residual.dtype == like.dtype:
            if residual.shape == self.unmapped(like, input).shape:
                added = self.maps(residual)
            if added is not None and added.stride() != like.stride():
                added = torch.empty_like(like, device=added.device).copy_(added)
        alone = residual is not None and added is None
        number = 0 if alone else ACTIVATIONS.index(self.activation)
        output = self.unmapped(multiply(maps, added, number), input)
        return finish(output, residual, self.activation) if alone else output

    def maps(self, input: Tensor) -> Tensor | None:
        """The input as (N, C, H, W); None where it is none."""
        raise TypeError(f"{type(self).__name__} is no layer of fst.pack.")

    def unmapped(self, output: Tensor, input: Tensor) -> Tensor:
        """The output, which is (N, Cout, P, Q), in the form of the input."""
        return output

    def library(self, input: Tensor, folded: Folded) -> Tensor:
        """The product by torch."""
        raise TypeError(f"{type(self).__name__} is no layer of fst.pack.")

    def _apply(self, *arguments: Any, **named: Any) -> nn.Module:
        before = self.weight.dtype
        applied = super()._apply(*arguments, **named)
        self.cast = self.cast if self.weight.dtype == before else None
        return applied

    def __setattr__(self, name: str, value: Any) -> None:
        """A new parameter is one of which nothing is known, for torch.export too."""
        if isinstance(value, Tensor):
            self._known = None
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Lists are for one kind of processor, and are made again."""
        return {**self.__dict__, "_known": None}

    def extra_repr(self) -> str:
        """As the plain layer's, with what was made part of it."""
        return ", ".join([super().extra_repr(), *self.follows])


class PackedConv2d(PackedLayer, nn.Conv2d):  # type: ignore[misc]  # parameters are never None
    """A convolution of `fst.pack`: see `PackedLayer`."""

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

    def _numbers(self) -> tuple[Any, ...]:
        of = (self.stride, self.padding, self.dilation, self.groups, self.padding_mode)
        return (self.cast, *of)

    def maps(self, input: Tensor) -> Tensor | None:
        """The input itself, unless it is a single image."""
        return input if input.dim() == 4 else None

    def library(self, input: Tensor, folded: Folded) -> Tensor:
        """The product by torch."""
        return F.conv2d(input, folded.weight, folded.bias, *self.geometry)

    def _library_plan(self, known: Known, input: Tensor, adds: bool) -> Plan:
        """By oneDNN itself where its operators can take a weight that is in its layout."""
        (weight, bias, _), (stride, padding, dilation, groups) = known.folded, known.geometry
        onednn, float32 = torch.backends.mkldnn, torch.float32
        applies = onednn.is_available() and onednn.enabled and input.numel() and weight.numel()
        last = input.is_contiguous(memory_format=torch.channels_last)
        if not (applies and last and input.dtype == weight.dtype == float32):
            return super()._library_plan(known, input, adds)
        if known.prepacked is None:
            known.prepacked = torch.ops.mkldnn._reorder_convolution_weight(
                weight, padding, stride, dilation, groups, list(input.shape)
            )
        prepacked, product = known.prepacked, torch.ops.mkldnn._convolution_pointwise
        own = self.activation if self.activation in ONEDNN and not adds else ""
        given: tuple[Any, ...] = (padding, stride, dilation, groups, *ONEDNN[own], "")
        rest = "" if own else self.activation
        return lambda input, residual: finish(
            product(input, prepacked, bias, *given), residual, rest
        )


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[misc]
    """A linear layer of `fst.pack`: see `PackedLayer`."""

    def maps(self, input: Tensor) -> Tensor | None:
        """All rows as one column of pixels."""
        if not (input.dim() and input.numel() and input.is_contiguous()):
            return None
        rows = input.reshape(1, -1, 1, input.shape[-1])
        return rows.permute(0, 3, 1, 2)

    def unmapped(self, output: Tensor, input: Tensor) -> Tensor:
        """The rows again."""
        return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], -1)

    def library(self, input: Tensor, folded: Folded) -> Tensor:
        """The product by torch."""
        return F.linear(input, folded.weight.flatten(1), folded.bias)


def finish(output: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(output + residual), written onto a new output."""
    if residual is not None:
        same = residual.shape == output.shape and residual.dtype == output.dtype
        is_relu = activation == "relu" and output.dtype == torch.float32
        if same and is_relu and not torch.compiler.is_compiling():
            return torch.ops.aten._add_relu_.Tensor(output, residual)  # one pass instead of two
        output = output.add_(residual) if same else output + residual
    return FUNCTIONS[activation](output)


def pack_layer(layer: nn.Module, name: str) -> PackedLayer:
    """Turn a plain layer that can be packed into a packed one; its parameters stay."""
    layer.__class__ = PackedConv2d if isinstance(layer, nn.Conv2d) else PackedLinear
    assert isinstance(layer, PackedLayer)  # its class has just become one
    layer.become_packed(name)
    return layer


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """The packed layers of a model, by name."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, PackedLayer)}
