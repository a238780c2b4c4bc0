"""Timing one layer GEMM by GEMM: torch's, each strategy's, each backend's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.api.selection import kept_dense, never_called
from fst.backends import Decision, Record, prefer
from fst.backends.choice import current_record, recording
from fst.backends.timing import Function, Timing, compare
from fst.layers.calls import LayerCall, each_call
from fst.ops import cpp
from fst.ops.arguments import padded_geometry
from fst.ops.conv import Call, as_maps, convolve_pruned, images_of_rows, rows_of_images
from fst.ops.geometry import LINEAR, Geometry, output_shape
from fst.ops.plan import CallPlan, draws_of
from fst.rules.sampled import Sampled
from fst.rules.strategy import GEMMS, Strategy

PLAIN = "torch"
PRUNING = "pruning"
# What a gain of the C++ kernels is without one of sampling: a list of all positions.
CONTROL = "dense, our kernel"
ALL_LISTED = Strategy(CONTROL, grad_weight=Sampled(keep=1.0, center=False))
BY_LISTS = {"grad_weight": cpp.BACKEND}
Convolution = Callable[[Tensor, Tensor], Tensor]


class LayerShape(NamedTuple):
    """A convolution, or a linear layer, and its input: what its time depends on."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    geometry: Geometry
    batch: int
    height: int
    width: int
    linear: bool = False

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output map."""
        image = (self.batch, self.in_channels, self.height, self.width)
        weight = (self.out_channels, self.in_channels, *self.kernel)
        return output_shape(image, weight, self.geometry)[2:]

    def __str__(self) -> str:
        if self.linear:
            tokens = f"{self.height}x{self.width}" if self.height > 1 else f"{self.width}"
            return f"{self.in_channels}->{self.out_channels} linear, {tokens} tokens"
        kernel, stride = "x".join(map(str, self.kernel)), self.geometry.stride[0]
        size = f"{self.height}x{self.width}"
        groups = f" g{self.geometry.groups}" if self.geometry.groups > 1 else ""
        return f"{self.in_channels}->{self.out_channels} {kernel} s{stride}{groups} {size}"


@dataclass(frozen=True)
class LayerTimes:
    """Times of one distinct layer.

    Attributes:
        count: how often the model has this shape.
        rounds: of each time.
        times: GEMM or "pruning" (S(W) and S(Wᵀ)) -> candidate -> timing. The candidate
            "torch" is `F.conv2d` or `F.linear` itself; "dense, our kernel" the C++ kernels with a
            list of all positions, beside strategies that draw some.
        decisions: the same keys -> strategy -> operation -> which backend was chosen, and why.
    """

    shape: LayerShape
    count: int
    rounds: int
    times: dict[str, dict[str, Timing]]
    decisions: dict[str, dict[str, dict[str, Decision]]] = field(default_factory=dict)

    def ratio(self, gemm: str, strategy: str) -> float:
        """Time of torch's dense GEMM over that of the strategy: above 1 is faster."""
        return self.ratios(gemm, strategy).median

    def ratios(self, gemm: str, strategy: str) -> Timing:
        """The median of torch's dense GEMM over the median and quartiles of the strategy's."""
        dense, timing = self.times[gemm][PLAIN].median, self.times[gemm][strategy]
        return Timing(dense / timing.median, dense / timing.high, dense / timing.low)


def padded_input(layer: nn.Conv2d, input: Tensor) -> tuple[Tensor, Geometry]:
    """The input of a convolution, padded as far as its `Geometry` does not say it."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    options = (layer.stride, padding, layer.dilation, layer.groups)
    return padded_geometry(input, layer.weight, *options)


def layer_shapes(
    model: nn.Module, run: Function, layers: str = "conv"
) -> dict[LayerShape, list[str]]:
    """The distinct calls of layers of ``model`` while ``run`` runs it, and whose calls they are.

    ``layers``: "conv", "linear" or "all", see `fst.convert`.
    """
    found: dict[LayerShape, list[str]] = {}
    left_out = {**kept_dense(model, layers), **never_called(model)}

    def record(call: LayerCall) -> None:
        if call.name not in left_out:
            found.setdefault(_shape_of(call.layer, call.input), []).append(call.name)

    with torch.no_grad(), each_call(model, (nn.Conv2d, nn.Linear), record):
        run()
    return found


def _shape_of(module: nn.Module, input: Tensor) -> LayerShape:
    if isinstance(module, nn.Linear):
        *samples, height, width = as_maps(input.shape[:-1])
        channels = (module.in_features, module.out_features)
        return LayerShape(*channels, (1, 1), LINEAR, math.prod(samples), height, width, True)
    image, geometry = padded_input(module, input)
    kernel = (module.kernel_size[0], module.kernel_size[1])
    batch, _, height, width = image.shape
    channels = (module.in_channels, module.out_channels)
    return LayerShape(*channels, kernel, geometry, batch, height, width)


class _Layer:
    """A layer on random operands."""

    def __init__(
        self,
        shape: LayerShape,
        device: torch.device,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> Tensor:
            values = torch.randn(size, generator=generator).to(device, dtype)
            return values if shape.linear else values.contiguous(memory_format=memory_format)

        self.linear, self.geometry = shape.linear, shape.geometry
        if self.linear:
            tokens = (shape.batch, shape.height, shape.width)
            self.images = random(*tokens, shape.in_channels)
            self.weight = random(shape.out_channels, shape.in_channels)
            self.grad_output = random(*tokens, shape.out_channels)
            return
        channels = shape.in_channels // shape.geometry.groups
        self.images = random(shape.batch, shape.in_channels, shape.height, shape.width)
        self.weight = random(shape.out_channels, channels, *shape.kernel)
        self.grad_output = random(shape.batch, shape.out_channels, *shape.output_size)

    def plain(self) -> dict[str, Function]:
        """The GEMMs of `F.conv2d`, or of `F.linear`."""

        def convolution(x: Tensor, w: Tensor) -> Tensor:
            return F.conv2d(x, w, None, *self.geometry)

        return self._gemms(lambda: F.linear if self.linear else convolution)

    def sparse(self, strategy: Strategy) -> dict[str, Function]:
        """GEMMs, and "pruning", under a strategy."""
        weight, record = self._as_conv(self.weight), current_record()

        def planned() -> CallPlan:
            return CallPlan(strategy, self.geometry, self.weight.dtype, record, trains=True)

        def made() -> Convolution:
            plan = planned()
            pruned = plan.prune(weight)

            def convolution(x: Tensor, w: Tensor) -> Tensor:
                call = Call(plan, pruned, draws_of(strategy, x))
                if not self.linear:
                    return convolve_pruned(x, w, None, call)
                output = convolve_pruned(images_of_rows(x, w), self._as_conv(w), None, call)
                return rows_of_images(output, x)

            return convolution

        pruning = planned()
        return {**self._gemms(made), PRUNING: lambda: pruning.prune(weight)}

    def _as_conv(self, weight: Tensor) -> Tensor:
        return weight[:, :, None, None] if self.linear else weight

    def _gemms(self, made: Callable[[], Convolution]) -> dict[str, Function]:
        functions: dict[str, Function] = {}
        for gemm in GEMMS:
            convolution = made()
            operands = [self.images.detach(), self.weight.detach()]
            if gemm == "output":
                functions[gemm] = torch.no_grad()(lambda x=operands, f=convolution: f(*x))
                continue
            operand = operands[gemm == "grad_weight"].requires_grad_()
            output = convolution(*operands)
            functions[gemm] = lambda output=output, operand=operand: torch.autograd.grad(
                output, operand, self.grad_output, retain_graph=True
            )
        return functions


def time_layer(
    shape: LayerShape,
    count: int,
    strategies: Mapping[str, Strategy],
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    repeats: int,
) -> LayerTimes:
    """Time the GEMMs and the pruning of one layer under each strategy, on random data."""
    layer = _Layer(shape, device, dtype, memory_format)
    candidates: dict[str, dict[str, Function]] = {
        PRUNING: {},
        **{gemm: {PLAIN: function} for gemm, function in layer.plain().items()},
    }
    decisions: dict[str, dict[str, dict[str, Decision]]] = {part: {} for part in candidates}
    for name, strategy in strategies.items():
        record = Record()
        with recording(record):
            for part, function in layer.sparse(strategy).items():
                candidates[part][name] = function
                record.decisions.clear()
                function()
                decisions[part][name] = dict(record.decisions)
    draws = any(strategy.sampling is not None for strategy in strategies.values())
    if draws and device.type == "cpu" and not cpp.missing():
        control = _control(layer)
        if control is not None:
            candidates["grad_weight"][CONTROL] = control
    times = {part: compare(functions, repeats, device) for part, functions in candidates.items()}
    return LayerTimes(shape, count, repeats, times, decisions)


def _control(layer: _Layer) -> Function | None:
    """The weight gradient of all positions by the C++ kernel; None where it cannot compute it."""
    record = Record()
    with prefer(**BY_LISTS), recording(record):
        function = layer.sparse(ALL_LISTED)["grad_weight"]
        function()
    decided = record.decisions.get("grad_weight")
    if decided is None or decided.backend != cpp.BACKEND:
        return None

    def run() -> None:
        with prefer(**BY_LISTS):
            function()

    return run
