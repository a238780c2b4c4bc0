"""Where the time of a training step goes: own time of operators, by torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from fst.lab.benchmark.steps import Contestant
from fst.layers.modules import sparse_layers

STEP = "fst: step"
LAYER = "fst: layer"
CATEGORIES = (
    "convolution output",
    "convolution gradients",
    "pruning, sums, copies",
    "batch norm",
    "other layers and loss",
    "compiled code",
    "decay, accumulation",
    "optimizer",
    "outside operators",
)
(_OUTPUT, _GRADIENTS, _PRUNING, _NORM, _OTHER, _COMPILED, _DECAY, _OPTIMIZER, _OUTSIDE) = CATEGORIES


def category(names: Sequence[str]) -> str:
    """The category of an operator.

    ``names``: its own name and those of the ranges and operators around it, innermost first. The
    first rule that fits decides.
    """

    def inside(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if inside("Optimizer."):
        return _OPTIMIZER
    if inside("AccumulateGrad"):
        return _DECAY
    if inside("fst::prune", "fst::sum", "fst::compress", "fst::pack"):
        return _PRUNING
    if inside("convolution_backward", "conv_transpose", "ConvolutionBackward"):
        return _GRADIENTS
    backward = inside("_SparseConv2dBackward", "CompiledFunctionBackward")
    if inside("convolution", "aten::conv2d"):
        return _GRADIENTS if backward else _OUTPUT
    if inside("fst::"):
        return _GRADIENTS if backward else _OUTPUT
    if inside(LAYER, "_SparseConv2d"):
        return _PRUNING
    if inside("batch_norm", "BatchNorm"):
        return _NORM
    if inside("CompiledFunction", "Torch-Compiled Region", "triton_"):
        return _COMPILED
    return _OUTSIDE if names[0] == STEP else _OTHER


def break_down(contestant: Contestant, device: torch.device) -> dict[str, float]:
    """Milliseconds of a profiled step by category: of three the one of median length.

    On a CPU own time of operators, which adds up to the step; on CUDA time of their kernels.
    """
    contestant.step()
    with _marked_layers(contestant.model):
        profiled = [_profiled(contestant, device) for _ in range(3)]
    return sorted(profiled, key=lambda spent: sum(spent.values()))[1]


def _profiled(contestant: Contestant, device: torch.device) -> dict[str, float]:
    activities = [ProfilerActivity.CPU]
    on_cuda = device.type == "cuda"
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        with record_function(STEP):
            contestant.step()
        if on_cuda:
            torch.cuda.synchronize(device)
    spent = dict.fromkeys(CATEGORIES, 0.0)
    for event in profiler.events():
        if event.device_type != DeviceType.CPU:
            continue
        names = [event.name]
        around = event.cpu_parent
        while around is not None:
            names.append(around.name)
            around = around.cpu_parent
        own = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if on_cuda or STEP in names:
            spent[category(names)] += own / 1e3
    return {name: milliseconds for name, milliseconds in spent.items() if milliseconds > 0}


@contextlib.contextmanager
def _marked_layers(model: nn.Module) -> Iterator[None]:
    """A range around the forward pass of each converted layer, where hooks do not recompile."""
    if model._compiled_call_impl is not None:
        yield
        return
    open_ranges: list[record_function] = []

    def enter(*_: object) -> None:
        open_ranges.append(record_function(LAYER))
        open_ranges[-1].__enter__()

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = []
    for layer in sparse_layers(model).values():
        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
