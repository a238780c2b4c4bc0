"""Timing one layer GEMM by GEMM: torch's, and each strategy's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fst.api.convert import convert
from fst.api.selection import kept_dense, never_called
from fst.backends import Decision
from fst.backends.timing import Function, Timing, compare
from fst.layers.calls import LayerCall, each_call
from fst.layers.frozen import frozen
from fst.layers.modules import SparseLayer
from fst.rules.strategy import GEMMS, Strategy

PLAIN = "torch"
Decisions = dict[str, dict[str, dict[str, Decision]]]


@dataclass(frozen=True)
class LayerShape:
    """A dense layer and the shape of its input.

    Attributes:
        layer: one of those that are alike.
        size: of the input, (N, C, H, W) or (..., C).
        names: of all that are alike, one for each call.
    """

    layer: nn.Module
    size: tuple[int, ...]
    names: list[str]

    def __str__(self) -> str:
        layer, size = self.layer, self.size
        if isinstance(layer, nn.Linear):
            tokens = "x".join(map(str, size[1:-1])) or "1"
            return f"{layer.in_features}->{layer.out_features} linear, {tokens} tokens"
        assert isinstance(layer, nn.Conv2d)
        groups = f" g{layer.groups}" if layer.groups > 1 else ""
        kernel, maps = "x".join(map(str, layer.kernel_size)), f"{size[-2]}x{size[-1]}"
        channels = f"{layer.in_channels}->{layer.out_channels}"
        return f"{channels} {kernel} s{layer.stride[0]}{groups} {maps}"


@dataclass(frozen=True)
class LayerTimes:
    """Times of one distinct layer.

    Attributes:
        rounds: of each time.
        times: GEMM -> candidate -> timing, without the pruning of the weight. The candidate "torch"
            is the dense layer.
        decisions: GEMM -> strategy -> operation -> which backend was chosen, and why.
    """

    shape: LayerShape
    rounds: int
    times: dict[str, dict[str, Timing]]
    decisions: Decisions

    def ratios(self, gemm: str, strategy: str) -> Timing:
        """The median of torch's dense GEMM over the median and quartiles of the strategy's."""
        dense, timing = self.times[gemm][PLAIN].median, self.times[gemm][strategy]
        return Timing(dense / timing.median, dense / timing.high, dense / timing.low)


def layer_shapes(model: nn.Module, run: Function, layers: str = "conv") -> list[LayerShape]:
    """The distinct calls of layers of ``model`` while ``run`` runs it.

    ``layers``: "conv", "linear" or "all", see `fst.convert`.
    """
    found: dict[tuple[str, torch.Size], LayerShape] = {}
    ignored = {**kept_dense(model, layers), **never_called(model)}

    def record(call: LayerCall) -> None:
        if call.name not in ignored:
            size = call.input.shape
            shape = found.setdefault((repr(call.layer), size), LayerShape(call.layer, size, []))
            shape.names.append(call.name)

    with torch.no_grad(), each_call(model, (nn.Conv2d, nn.Linear), record):
        run()
    return list(found.values())


def time_layer(
    shape: LayerShape,
    strategies: Mapping[str, Strategy],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> LayerTimes:
    """Time the GEMMs of one layer under each strategy, on random data."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(shape.size, generator=generator).to(device, dtype)
    dense = copy.deepcopy(shape.layer).eval().requires_grad_(False).to(device, dtype)
    if isinstance(dense, nn.Conv2d):
        input = input.contiguous(memory_format=torch.channels_last)
        dense = dense.to(memory_format=torch.channels_last)
    functions: dict[str, dict[str, Function]] = {gemm: {} for gemm in GEMMS}
    decisions: Decisions = {gemm: {} for gemm in GEMMS}
    with ExitStack() as stack:
        for gemm in GEMMS:
            functions[gemm][PLAIN] = _gemm(copy.deepcopy(dense), gemm, input)
            for name, strategy in strategies.items():
                layer = _converted(dense, strategy)
                stack.enter_context(frozen(layer))  # its first call alone prunes
                functions[gemm][name] = _gemm(layer, gemm, input)
                decisions[gemm][name] = _decisions_of(layer, functions[gemm][name])
        times = {gemm: compare(functions[gemm], repeats, device) for gemm in GEMMS}
    return LayerTimes(shape, repeats, times, decisions)


def _converted(dense: nn.Module, strategy: Strategy) -> SparseLayer:
    layer = copy.deepcopy(dense)
    convert(layer, replace(strategy, schedule=None), include=type(layer))
    assert isinstance(layer, SparseLayer)
    return layer


def _gemm(layer: nn.Module, gemm: str, input: Tensor) -> Function:
    """A call that computes one GEMM of the layer."""
    if gemm == "output":
        return torch.no_grad()(lambda: layer(input))
    operand = layer.weight if gemm == "grad_weight" else input.detach()
    operand.requires_grad_()
    output = layer(operand if gemm == "grad_input" else input)
    grad_output = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, operand, grad_output, retain_graph=True)


def _decisions_of(layer: SparseLayer, function: Function) -> dict[str, Decision]:
    """Those that a call takes; the forward pass has taken others before."""
    found = layer.state.record.decisions
    found.clear()
    function()
    return dict(found)
