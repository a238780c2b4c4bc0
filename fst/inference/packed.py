"""Layers for inference alone, which multiply by the library or by the zeros of their weight.

`fst.pack` turns plain layers into these by changing their class. The parameters stay those of the
plain layer. Batch norm, the residual addition and the activation that follow it can become part of
the layer's own write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from fst.backends.timing import Timing, compare
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
from fst.layers.checks import refuse_packed_call
from fst.ops.cpp.zeros_weight import (
    ACTIVATIONS,
    PreparedOutput,
    kept_output,
    refuses_zeros,
)
from fst.ops.geometry import LINEAR, Geometry, empty_maps, is_channels_last, output_shape

LIBRARY = 0  # else what the lanes of a vector hold, as fst.ops.cpp.zeros_weight numbers it
WAYS = {LIBRARY: "library", 1: "zeros, over images", 2: "zeros, over pixels"}
LEAST_IMAGES = 4  # of a batch that can fill the lanes of a vector
ONEDNN: dict[str, tuple[str, list[float]]] = {  # activations as oneDNN's operators name them
    "": ("none", []),
    "relu": ("relu", []),
    "relu6": ("hardtanh", [0.0, 6.0]),
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


class Folded(NamedTuple):
    """Weight and bias of a layer, batch norm included.

    Attributes:
        weight: in the dtype of the products, as a convolution's: (Cout, Cin/groups, kh, kw).
        bias: (Cout,) in the same dtype, or None.
        exact_bias: ``bias`` in float32.
    """

    weight: Tensor
    bias: Tensor | None
    exact_bias: Tensor | None


class Together(Protocol):
    """Layers that are computed as one, see `fst.inference.chained.Chain`."""

    layers: tuple[PackedConv2d, ...]

    def __call__(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The last layer's output."""


class PackedLayer(nn.Module):
    """Base class of `PackedConv2d` and `PackedLinear`.

    Attributes:
        layer_name: in the model.
        norms: the batch norm that is multiplied into the weight, or nothing.
        activation: an index of ACTIVATIONS.
        dtype: of the products.
        only_library: never by zeros.
        times: of each input that was timed, milliseconds of each of WAYS that applies.
        chain: which computes the layer together with others, and is called in its stead; or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    layer_name: str
    norms: tuple[_BatchNorm, ...]
    activation: int
    dtype: torch.dtype
    only_library: bool
    times: dict[Key, dict[int, Timing]]
    chosen: dict[Key, int]
    products: dict[Key, PreparedOutput]
    kept: Folded | None
    laid: Tensor | None
    chain: Together | None

    def become_packed(self, name: str) -> None:
        """Set the attributes; the batch norm and the activation are not yet part of it."""
        self.__dict__.update(layer_name=name, norms=(), activation=0, dtype=self.weight.dtype)
        self.__dict__.update(
            only_library=False, times={}, chosen={}, products={}, kept=None, laid=None, chain=None
        )
        self.register_load_state_dict_post_hook(forget)

    @property
    def geometry(self) -> Geometry:
        """Of the convolution; a linear layer is one of 1x1."""
        return LINEAR

    def folded(self) -> Folded:
        """The weight and the bias, batch norm included."""
        if self.kept is not None:
            return self.kept
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        if self.norms:
            norm = self.norms[0]
            mean, variance = norm.running_mean, norm.running_var
            assert mean is not None and variance is not None  # of a norm that can be folded
            scale, shift = (None if p is None else p.detach() for p in (norm.weight, norm.bias))
            fused = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
            weight, bias = (value.detach() for value in fused)
        weight = weight.to(self.dtype)
        weight = weight[:, :, None, None] if weight.dim() == 2 else weight
        exact = None if bias is None else bias.float()
        made = Folded(weight, None if bias is None else bias.to(self.dtype), exact)
        if not torch.compiler.is_compiling():
            self.kept = made
        return made

    def forward(
        self,
        input: Tensor,
        residual: Tensor | float | None = None,
        fused: bool = False,
        chained: bool = False,
    ) -> Tensor:
        """activation(W * input + bias + residual).

        Args:
            fused: whether the caller leaves out the batch norm and the activation that became part
                of the layer; those who do not know of them get the plain layer's output.
            chained: whether the caller leaves out the layers with which the layer's chain begins,
                and ``input`` is theirs.

        Raises:
            UsageError: the layer is in training mode, a gradient is asked for, or a tensor is not
                on the CPU.
        """
        if isinstance(residual, int | float | torch.SymInt):  # as in conv(x) + x.size(0)
            residual = input.new_full((), residual)
        self.refuse_misuse(input, residual)
        if not fused and (self.norms or self.activation):
            return self._without_followers(input)
        if self.chain is not None and (chained or len(self.chain.layers) == 1):
            return self.chain(input, residual)
        return self.alone(input, residual)

    def _without_followers(self, input: Tensor) -> Tensor:
        """The plain layer's output, in the dtype of the products."""
        if self.weight.dtype == self.dtype:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return self.library(input, Folded(self.weight.detach().to(self.dtype), bias, None))

    def alone(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """`forward` without the chain's other layers."""
        if torch.compiler.is_compiling() or type(input) is not Tensor:
            return self._traced(input, residual)
        key = key_of(input, residual)
        lanes = LIBRARY if self.only_library else self.chosen.get(key)
        if lanes is None:
            lanes = self._choose(key, input, residual)
        if lanes == LIBRARY:
            return self._by_library(input, residual)
        product = self.products.get(key) or self._prepare(key, input, lanes)
        return self._by_zeros(input, residual, product)

    def refuse_misuse(self, *operands: Tensor | None) -> None:
        """Raise UsageError in training mode, where a gradient is asked for, or off the CPU."""
        tensors = [x for x in (*operands, self.weight, self.bias) if x is not None]
        refuse_packed_call(self.layer_name, self.training, tensors)

    def _traced(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """For compilers and torch.export, which can neither time nor look into a dictionary."""
        key, lanes = next(iter(self.chosen.items()), (None, LIBRARY))
        maps, folded = self.maps(input), self.folded()
        if self.only_library or lanes == LIBRARY or key is None or maps is None:
            return self._by_library(input, residual)
        product = self.products.get(key)
        shape = output_shape(maps.shape, folded.weight.shape, self.geometry)
        operands = (folded.weight, None if product is None else product.lists, folded.exact_bias)

        def multiply(added: Tensor | None, activation: int) -> Tensor:
            return kept_output(maps, *operands, added, *self.geometry, activation, lanes)

        like = empty_maps(shape, maps, is_channels_last(maps))
        return self._multiplied(multiply, input, residual, like)

    def _by_zeros(self, input: Tensor, residual: Tensor | None, product: PreparedOutput) -> Tensor:
        maps = self.maps(input)
        assert maps is not None  # lanes were chosen
        return self._multiplied(partial(product, maps), input, residual, product.like)

    def _multiplied(
        self,
        multiply: Callable[[Tensor | None, int], Tensor],
        input: Tensor,
        residual: Tensor | None,
        like: Tensor,
    ) -> Tensor:
        """activation(multiply + residual), in one go if the residual has the form of ``like``."""
        added = None if residual is None else self.maps(residual)
        if added is not None and (added.shape != like.shape or added.dtype != like.dtype):
            added = None
        if added is not None and added.stride() != like.stride():
            added = torch.empty_like(like, device=added.device).copy_(added)
        alone = residual is not None and added is None
        output = self.unmapped(multiply(added, 0 if alone else self.activation), input)
        return self._finish(output, residual) if alone else output

    def _choose(self, key: Key, input: Tensor, residual: Tensor | None) -> int:
        """The fastest of WAYS for such an input, timed unless many others were."""
        with CHOOSING, torch.no_grad():
            if key in self.chosen:
                return self.chosen[key]
            maps = self.maps(input)
            ways = [LIBRARY]
            if maps is not None and not refuses_zeros(maps, self.folded().weight, self.geometry):
                ways += [1, 2] if maps.shape[0] >= LEAST_IMAGES else [2]
            if len(ways) > 1 and len(self.times) >= MOST_TIMED:
                lanes = self.chosen[nearest(self.times, key)]
                lanes = lanes if lanes in ways else ways[-1]
            else:
                lanes = self._time(key, input, residual, ways)
            self.chosen[key] = lanes
            return lanes

    def _time(self, key: Key, input: Tensor, residual: Tensor | None, ways: list[int]) -> int:
        functions: dict[str, Callable[[], object]] = {}
        for lanes in ways:
            if lanes == LIBRARY:
                functions[WAYS[lanes]] = partial(self._by_library, input, residual)
                continue
            product = self._product(input, lanes)
            functions[WAYS[lanes]] = partial(self._by_zeros, input, residual, product)
        timings = compare(functions, REPEATS, input.device, warmup=1, most=MOST_MS)
        self.times[key] = {lanes: timings[WAYS[lanes]] for lanes in ways}
        return min(ways, key=lambda lanes: self.times[key][lanes].median)

    def _prepare(self, key: Key, input: Tensor, lanes: int) -> PreparedOutput:
        product = self._product(input, lanes)
        remember(self.products, key, product)
        return product

    def _product(self, input: Tensor, lanes: int) -> PreparedOutput:
        maps, folded = self.maps(input), self.folded()
        assert maps is not None  # lanes were chosen
        with torch.inference_mode(False), torch.no_grad():
            return PreparedOutput(maps, folded.weight, folded.exact_bias, self.geometry, lanes)

    def _by_library(self, input: Tensor, residual: Tensor | None) -> Tensor:
        return self._finish(self.library(input, self.folded()), residual)

    def _finish(self, output: Tensor, residual: Tensor | None) -> Tensor:
        if residual is not None:
            same = residual.shape == output.shape and residual.dtype == output.dtype
            is_relu = ACTIVATIONS[self.activation] == "relu" and output.dtype == torch.float32
            if same and is_relu and not torch.compiler.is_compiling():
                return torch.ops.aten._add_relu_.Tensor(output, residual)  # one pass instead of two
            output = output.add_(residual) if same else output + residual
        return FUNCTIONS[ACTIVATIONS[self.activation]](output)

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
        if self.weight.dtype != before:
            self.dtype = self.weight.dtype
        forget(self)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        """Lists are for one kind of processor, and are made again."""
        return {**self.__dict__, "products": {}, "kept": None, "laid": None}

    def extra_repr(self) -> str:
        """As the plain layer's, with what was made part of it."""
        parts = [super().extra_repr(), *(["batch norm"] if self.norms else [])]
        return ", ".join([*parts, *filter(None, [ACTIVATIONS[self.activation]])])


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

    def maps(self, input: Tensor) -> Tensor | None:
        """The input itself, unless it is a single image."""
        return input if input.dim() == 4 else None

    def _by_library(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """By oneDNN itself where a weight can be laid out for it once."""
        folded = self.folded()
        laid = None if torch.compiler.is_compiling() else self._laid_out(input, folded)
        if laid is None:
            return super()._by_library(input, residual)
        stride, padding, dilation, groups = self.geometry
        activation = ONEDNN["" if residual is not None else ACTIVATIONS[self.activation]]
        given: tuple[Any, ...] = (padding, stride, dilation, groups, *activation, "")
        output = torch.ops.mkldnn._convolution_pointwise(input, laid, folded.bias, *given)
        return output if residual is None else self._finish(output, residual)

    def library(self, input: Tensor, folded: Folded) -> Tensor:
        """The product by torch."""
        return F.conv2d(input, folded.weight, folded.bias, *self.geometry)

    def _laid_out(self, input: Tensor, folded: Folded) -> Tensor | None:
        """oneDNN's own layout of the weight, which F.conv2d makes again at each call.

        None where the operators that torch.compile uses for it are missing, or do not apply.
        """
        if self.laid is None:
            onednn = torch.backends.mkldnn
            if not (onednn.is_available() and onednn.enabled and self.dtype == torch.float32):
                return None
            if input.dim() != 4 or not input.numel() or not folded.weight.numel():
                return None
            stride, padding, dilation, groups = self.geometry
            with torch.inference_mode(False), torch.no_grad():
                self.laid = torch.ops.mkldnn._reorder_convolution_weight(
                    folded.weight, padding, stride, dilation, groups, list(input.shape)
                )
        last = input.is_contiguous(memory_format=torch.channels_last)
        applies = last and input.dtype == torch.float32 and input.numel() > 0
        return self.laid if applies else None


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


def forget(layer: PackedLayer, *_: object) -> None:
    """Forget what was made of the weight, which has changed."""
    layer.products.clear()
    layer.kept = layer.laid = None


def pack_layer(layer: nn.Module, name: str) -> PackedLayer:
    """Turn a plain layer that can be packed into a packed one; its parameters stay."""
    layer.__class__ = PackedConv2d if isinstance(layer, nn.Conv2d) else PackedLinear
    assert isinstance(layer, PackedLayer)  # its class has just become one
    layer.become_packed(name)
    return layer
