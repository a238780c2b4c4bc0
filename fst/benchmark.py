"""Side-by-side timing of convolutions, GEMM by GEMM, and of whole training steps.

Everything that is compared is timed in one run, in turns, in both orders; a result is a ratio of
medians. Used by `tools/benchmark.py`.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.convert import convert
from fst.modules import sparse_layers
from fst.ops.conv import convolve_pruned
from fst.ops.geometry import Geometry
from fst.ops.prune import PrunedWeight, prune_weight
from fst.ops.strided import program
from fst.state import attach
from fst.strategy import GEMMS, Alternating, Strategy

PLAIN = "torch"
Function = Callable[[], object]


class Timing(NamedTuple):
    """Milliseconds: median and the quartiles around it."""

    median: float
    low: float
    high: float


class ConvShape(NamedTuple):
    """A convolution and its input: what its time depends on."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    geometry: Geometry
    batch: int
    height: int
    width: int

    def __str__(self) -> str:
        kernel, stride = "x".join(map(str, self.kernel)), self.geometry.stride[0]
        size = f"{self.height}x{self.width}"
        groups = f" g{self.geometry.groups}" if self.geometry.groups > 1 else ""
        return f"{self.in_channels}->{self.out_channels} {kernel} s{stride}{groups} {size}"


@dataclass(frozen=True)
class LayerTimes:
    """Times of one distinct convolution.

    Attributes:
        count: how often the model has this shape.
        times: GEMM, or "pruning" (S(W) and S(Wᵀ)) -> contestant -> timing; the contestant "torch"
            is `F.conv2d` itself.
        programs: strategy -> how its alternating grad_weight was computed.
    """

    shape: ConvShape
    count: int
    times: dict[str, dict[str, Timing]]
    programs: dict[str, str]

    def ratio(self, gemm: str, strategy: str) -> float:
        """Time of torch's dense GEMM over that of the strategy: above 1 is faster."""
        return self.times[gemm][PLAIN].median / self.times[gemm][strategy].median


def compare(
    functions: Mapping[str, Function], repeats: int, device: torch.device, warmup: int = 3
) -> dict[str, Timing]:
    """Time all functions in turns, every other round in reverse order."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(warmup):
            function()
    order = list(functions)
    for _ in range(repeats):
        for name in order:
            samples[name].append(_milliseconds(functions[name], device))
        order.reverse()
    return {name: _timing(values) for name, values in samples.items()}


def _milliseconds(function: Function, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end)
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def _timing(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def conv_shapes(model: nn.Module, run: Function) -> dict[ConvShape, int]:
    """The distinct calls of `nn.Conv2d` of ``model`` while ``run`` runs it, and their numbers."""
    found: dict[ConvShape, int] = {}

    def record(module: nn.Conv2d, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        padding = module.padding if isinstance(module.padding, tuple) else (0, 0)
        geometry = Geometry(module.stride, padding, module.dilation, module.groups)
        kernel = (module.kernel_size[0], module.kernel_size[1])
        shape = ConvShape(
            module.in_channels, module.out_channels, kernel, geometry, *inputs[0].shape[::2], 0
        )._replace(height=inputs[0].shape[2], width=inputs[0].shape[3])
        found[shape] = found.get(shape, 0) + 1

    hooks = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def time_layer(
    shape: ConvShape,
    count: int,
    strategies: Mapping[str, Strategy],
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    repeats: int,
) -> LayerTimes:
    """Time the GEMMs and the pruning of one convolution under each strategy, on random data."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator).to(device, dtype)
        return values.contiguous(memory_format=memory_format)

    geometry = shape.geometry
    images = random(shape.batch, shape.in_channels, shape.height, shape.width)
    channels = shape.in_channels // geometry.groups
    weight = random(shape.out_channels, channels, *shape.kernel)
    output_size = F.conv2d(images[:1], weight, None, *geometry).shape[1:]
    grad_output = random(shape.batch, *output_size)
    functions: dict[str, dict[str, Function]] = {gemm: {} for gemm in (*GEMMS, "pruning")}

    def add(name: str, convolution: Callable[[Tensor, Tensor], Tensor]) -> None:
        functions["output"][name] = torch.no_grad()(lambda: convolution(images, weight))
        for gemm, position in (("grad_input", 0), ("grad_weight", 1)):
            operands = [images.detach(), weight.detach()]
            operand = operands[position].requires_grad_()
            output = convolution(*operands)
            functions[gemm][name] = lambda output=output, operand=operand: torch.autograd.grad(
                output, operand, grad_output, retain_graph=True
            )

    add(PLAIN, lambda x, w: F.conv2d(x, w, None, *geometry))
    programs = {}
    for name, strategy in strategies.items():
        pruned = prune_weight(weight, strategy, geometry.groups, dtype)
        functions["pruning"][name] = _repruning(weight, strategy, geometry.groups, dtype)

        def convolution(
            x: Tensor, w: Tensor, pruned: PrunedWeight = pruned, strategy: Strategy = strategy
        ) -> Tensor:
            return convolve_pruned(x, w, None, pruned, *geometry, strategy, decay=0.0)

        add(name, convolution)
        rule = strategy.grad_weight
        if isinstance(rule, Alternating):
            step = tuple(s * b for s, b in zip(geometry.stride, rule.block, strict=True))
            kept = grad_output[:, :, :: rule.block[0], :: rule.block[1]]
            programs[name] = program(kept, shape.kernel, geometry._replace(stride=step))
    times = {gemm: compare(contestants, repeats, device) for gemm, contestants in functions.items()}
    return LayerTimes(shape, count, times, programs)


@dataclass(frozen=True)
class Training:
    """What is trained when whole steps are compared; each contestant trains a copy.

    Attributes:
        model: the dense model.
        loss: its training loss on a fixed batch, for the model or a copy of it.
        root: the part of a model that is converted.
        selection: ``include`` and ``exclude`` of `fst.convert`.
        amp_dtype: autocast's type, or None without autocast.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    root: Callable[[nn.Module], nn.Module] = lambda model: model
    selection: Mapping[str, Any] = field(default_factory=dict)
    amp_dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def contestant(self, strategy: Strategy | None) -> tuple[nn.Module, Function]:
        """A copy of the model, converted unless ``strategy`` is None, and its training step."""
        trained = copy.deepcopy(self.model).train()
        parameters = (p for p in trained.parameters() if p.requires_grad)
        optimizer = torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)
        attached = None
        if strategy is not None:
            convert(self.root(trained), strategy, **self.selection)
            root = self.root(trained)
            attached = attach(root, optimizer, total_steps=10**6, steps_per_epoch=10**3)

        def step() -> None:
            enabled = self.amp_dtype is not None
            with torch.autocast(self.device.type, self.amp_dtype, enabled=enabled):
                loss = self.loss(trained)
            if attached is not None:
                attached.report_loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return trained, step


def time_steps(
    training: Training, strategies: Mapping[str, Strategy], repeats: int
) -> dict[str, dict[str, Timing]]:
    """Time a training step (forward, backward, SGD) of the plain model and of each strategy.

    Returns:
        {"step": contestant -> timing, "pruning": strategy -> S(W) and S(Wᵀ) of all layers whose
        weight is trained}.
    """
    steps: dict[str, Function] = {}
    pruning: dict[str, Function] = {}
    for name, strategy in {PLAIN: None, **strategies}.items():
        trained, steps[name] = training.contestant(strategy)
        if strategy is not None:
            pruning[name] = _pruning_of(trained, training.amp_dtype)
    return {
        "step": compare(steps, repeats, training.device),
        "pruning": compare(pruning, repeats, training.device),
    }


def _repruning(weight: Tensor, strategy: Strategy, groups: int, dtype: torch.dtype) -> Function:
    """Pruning as a training step does it: into the memory of the step before."""
    memory: list[PrunedWeight | None] = [None]

    def prune() -> None:
        memory[0] = prune_weight(weight, strategy, groups, dtype, reuse=memory[0])

    return torch.no_grad()(prune)


def _pruning_of(model: nn.Module, amp_dtype: torch.dtype | None) -> Function:
    layers = [
        _repruning(
            layer.weight_as_conv(),
            layer.strategy,
            layer.conv_groups,
            amp_dtype or layer.weight.dtype,
        )
        for layer in sparse_layers(model).values()
        if layer.weight.requires_grad
    ]
    return lambda: [prune() for prune in layers]
