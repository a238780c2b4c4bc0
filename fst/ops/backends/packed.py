"""Backends of packed layers: PyTorch's library, and the kernels by the zeros of the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fst.backends.choice import DENSE
from fst.backends.registry import Backend, register_backend
from fst.ops import cpp
from fst.ops.backends.zeros_weight import lists_of, product_numbers, refuses_zeros, zeros_output
from fst.ops.packed import Finished, Packed, PackedChain, by_library, finish, finished, to_nchw

LEAST_IMAGES = 4  # of a batch that can fill the lanes of a vector
ONEDNN: dict[str, tuple[str, list[float]]] = {  # its maximum would make 0 of NaN in ReLU and ReLU6
    "": ("none", []),
    "silu": ("swish", []),
    "hardswish": ("hardswish", []),
}


class PackedLibrary(Backend):
    """PyTorch's product; or oneDNN's own where its operator takes a weight in its layout."""

    name = DENSE
    computes = {"packed": "the library's product"}

    def packed(self, operands: Packed) -> Callable[[Packed], Tensor]:
        input, weight = operands.input, operands.weight
        folded, geometry, activation = weight.folded, weight.geometry, weight.activation
        onednn, is_dense = torch.backends.mkldnn, input.numel() and folded.weight.numel()
        applies = onednn.is_available() and onednn.enabled and is_dense and input.dim() == 4
        applies = applies and input.is_contiguous(memory_format=torch.channels_last)
        is_float32 = input.dtype == folded.weight.dtype == torch.float32
        if geometry.is_linear or not (applies and is_float32):
            return lambda o: finish(by_library(o.input, folded, geometry), o.residual, activation)
        stride, padding, dilation, groups = geometry
        if weight.prepacked is None:
            weight.prepacked = torch.ops.mkldnn._reorder_convolution_weight(
                folded.weight, padding, stride, dilation, groups, list(input.shape)
            )
        prepacked, product = weight.prepacked, torch.ops.mkldnn._convolution_pointwise
        own = activation if activation in ONEDNN and operands.residual is None else ""
        given: tuple[Any, ...] = (folded.bias, padding, stride, dilation, groups, *ONEDNN[own], "")
        if own == activation and operands.residual is None:
            return lambda o: product(o.input, prepacked, *given)
        return lambda o: finish(product(o.input, prepacked, *given), o.residual, activation)


class ZerosOverImages(Backend):
    """Lists of the weights that are not zero, made once; vectors run over images."""

    name = "zeros_images"
    computes = {"packed": "C++ for CPUs: zeros of the weight are skipped, vectors of images"}
    lanes = 1

    def unavailable(self) -> str:
        return cpp.missing()

    def refuses(self, operands: Packed) -> str:
        of, maps = operands.weight, to_nchw(operands.input, operands.weight.geometry)
        if maps is None:
            return "the input is no batch of maps"
        if self.lanes == ZerosOverImages.lanes and len(maps) < LEAST_IMAGES:
            return f"fewer than {LEAST_IMAGES} images"
        return refuses_zeros(maps, of.folded.weight, of.geometry)

    def cost(self, operands: Packed) -> float:
        return max(1 - operands.weight.zeros, 0.05) / 0.7

    def skipped(self, operands: Packed) -> str:
        zeros = operands.weight.zeros
        return f"zeros of W, {zeros:.0%}" if zeros else ""

    def packed(self, operands: Packed) -> Callable[[Packed], Tensor]:
        input, of = operands.input, operands.weight
        maps, geometry, weight = to_nchw(input, of.geometry), of.geometry, of.folded.weight
        assert maps is not None  # else it refuses
        numbers = product_numbers(maps.shape, weight.shape, geometry, False, self.lanes)
        lists, bias = lists_of(weight, numbers), of.folded.exact_bias
        of.lists.setdefault(self.name, lists)

        def plan(residual: Tensor | None, activation: int) -> Finished:
            form = (maps, weight, lists, bias, residual, *geometry, activation, self.lanes)
            multiply = zeros_output.plan(*form)
            return lambda maps, residual: multiply(maps, weight, lists, bias, residual)

        like = cpp.like_output(maps, weight, *geometry)
        run = finished(plan, like, input, operands.residual, geometry, of.activation)
        return lambda o: run(o.input, o.residual)


class ZerosOverPixels(ZerosOverImages):
    """The same; vectors run over pixels: parts of images, or the rows of a linear layer."""

    name = "zeros_pixels"
    computes = {"packed": "C++ for CPUs: zeros of the weight are skipped, vectors of pixels"}
    lanes = 2


class Unfused(Backend):
    """A depthwise layer and its neighbours one after the other, each by its own backend."""

    name = "unfused"
    computes = {"packed": "layers around a depthwise one, one after the other"}

    def packed_chain(self, operands: PackedChain) -> Callable[[PackedChain], Tensor]:
        operands.unfused(operands.input, operands.residual)  # each layer makes its plan
        return lambda o: o.unfused(o.input, o.residual)


LIBRARY = ("", PackedLibrary.name, Unfused.name)  # runs where no kernel of this package does
LANES = {of.name: of.lanes for of in (ZerosOverImages, ZerosOverPixels)}
for _backend in (PackedLibrary(), ZerosOverImages(), ZerosOverPixels(), Unfused()):
    register_backend(_backend)
