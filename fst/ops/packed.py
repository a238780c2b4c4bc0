"""The operands of packed layers: products for inference, with all that follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends.choice import Key, Operands, key_of
from fst.ops.backends.zeros_weight import ACTIVATIONS
from fst.ops.geometry import Geometry

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda maps: maps,
    "relu": F.relu_,
    "relu6": lambda maps: F.relu6(maps, inplace=True),
    "silu": lambda maps: F.silu(maps, inplace=True),
    "hardswish": lambda maps: F.hardswish(maps, inplace=True),
}
Finished = Callable[[Tensor, Tensor | None], Tensor]  # of the input and the residual of a layer


class Folded(NamedTuple):
    """Weight and bias of a layer, batch norm included.

    Attributes:
        weight: in the dtype of the products, as a convolution's: (Cout, Cin/groups, kh, kw).
        bias: (Cout,) in the same dtype, or None.
        exact_bias: ``bias`` in float32, contiguous.
    """

    weight: Tensor
    bias: Tensor | None
    exact_bias: Tensor | None


@dataclass(eq=False)
class PackedWeight:
    """Operands of a packed layer that last as long as its tensors do not change.

    Attributes:
        geometry: of the convolution; `LINEAR` of a linear layer.
        activation: one of ACTIVATIONS, computed last.
        zeros: share of zeros in the weight, in eighths.
        numbers, versions: of the layer, and of its tensors.
        tensors, memory: are kept, so that no identity and no address is used again.
        prepacked: oneDNN's layout of the weight, which F.conv2d makes at each call; or None.
        lists: backend -> its lists of the weight, for the first form of the input.
    """

    folded: Folded
    geometry: Geometry
    activation: str
    zeros: float
    numbers: tuple[Any, ...]
    versions: list[Any]
    tensors: list[Tensor | None]
    memory: list[Tensor | None]
    prepacked: Tensor | None = None
    lists: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Packed(Operands):
    """activation(W·X + bias + residual) of a packed layer.

    Attributes:
        input: (N, Cin, H, W) of a convolution, (..., Cin) of a linear layer.
        residual: of any form that can be added.
        before, behind: layers of 1x1 around a depthwise one, if they are computed together; the
            residual is that of the last layer.
    """

    operation = kind = "packed"
    trains = False
    input: Tensor
    residual: Tensor | None
    weight: PackedWeight
    before: PackedWeight | None = None
    behind: PackedWeight | None = None

    @property
    def device(self) -> torch.device:
        return self.input.device

    def key(self) -> Key:
        tensors, options = [self.input], []
        for of in filter(None, (self.weight, self.before, self.behind)):
            tensors.append(of.folded.weight)
            has_bias = of.folded.bias is not None
            options.append((of.activation, of.zeros, has_bias, *of.geometry.form))
        if self.residual is not None:
            tensors.append(self.residual)
        return key_of(*tensors, options=(self.before is not None, *options))


@dataclass(slots=True, kw_only=True)
class PackedChain(Packed):
    """`Packed` of a depthwise layer with those around it.

    Attributes:
        unfused: computes the layers one after the other.
    """

    kind = "packed_chain"
    unfused: Finished


def to_nchw(input: Tensor, geometry: Geometry) -> Tensor | None:
    """The input as (N, C, H, W): of a linear layer all rows as one column of pixels; else None."""
    if not geometry.is_linear:
        return input if input.dim() == 4 else None
    if not (input.dim() and input.numel() and input.is_contiguous()):
        return None
    return input.reshape(1, -1, 1, input.shape[-1]).permute(0, 3, 1, 2)


def from_nchw(output: Tensor, input: Tensor, geometry: Geometry) -> Tensor:
    """The output (N, Cout, P, Q) with the axes of the input."""
    if not geometry.is_linear:
        return output
    return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], -1)


def by_library(input: Tensor, folded: Folded, geometry: Geometry) -> Tensor:
    """W·X + bias by torch."""
    if geometry.is_linear:
        return F.linear(input, folded.weight.flatten(1), folded.bias)
    return F.conv2d(input, folded.weight, folded.bias, *geometry)


def finish(output: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(output + residual), written onto a new output."""
    if residual is not None:
        same = residual.shape == output.shape and residual.dtype == output.dtype
        is_relu = activation == "relu" and output.dtype == torch.float32
        if same and is_relu and not torch.compiler.is_compiling():
            return torch.ops.aten._add_relu_.Tensor(output, residual)  # one pass instead of two
        output = output.add_(residual) if same else output + residual
    return FUNCTIONS[activation](output)


def finished(
    plan: Callable[[Tensor | None, int], Finished],
    like: Tensor,
    input: Tensor,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Finished:
    """activation(W·X + bias + residual) of tensors of this form, as one product where that can add
    the residual.

    Args:
        plan: takes a residual in the form of the output, and an index of ACTIVATIONS; returns a
            function of maps and such a residual.
        like: the form of the output (N, Cout, P, Q).
    """
    added = None
    if residual is not None and residual.dtype == like.dtype:
        if residual.shape == from_nchw(like, input, geometry).shape:
            added = to_nchw(residual, geometry)
    if residual is not None and (added is None or added.stride() != like.stride()):
        product = finished(plan, like, input, None, geometry, "")
        return lambda input, residual: finish(product(input, None), residual, activation)
    multiply = plan(added, ACTIVATIONS.index(activation))
    if not geometry.is_linear:
        return multiply

    def run(input: Tensor, residual: Tensor | None) -> Tensor:
        added = None if residual is None else to_nchw(residual, geometry)
        maps: Any = to_nchw(input, geometry)
        return from_nchw(multiply(maps, added), input, geometry)

    return run
