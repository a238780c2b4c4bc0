"""Which axes of a model's parameters and buffers hold the same channels, from its traced graph.

An axis is the number of the channel at each of its elements: a map (C, H, W) flattened has each
number H·W times. torch.export gives the operations of a call, in their order. Each unites the
channels that it pairs, and fixes those whose number or place matters to it. An operation that is
not in `OPERATIONS` fixes all channels that it reads and makes; so do inputs and outputs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fst.basics.errors import UsageError

Axis = tuple[int, ...]


class Traced(NamedTuple):
    """A tensor of the graph, by its axes."""

    axes: list[Axis]


class Axes:
    """The channels of all tensors of a model.

    Attributes:
        tensors: the parameters and buffers by name.
        unused: the ids of those with channels that no traced call has used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._same: list[int] = []  # channel -> itself, or one before it that it was united with
        self._fixed: dict[int, str] = {}
        self._model = model
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self.unused = {id(tensor) for tensor in self.tensors.values() if tensor.dim()}
        self._stored = {
            id(tensor): Traced([self.new(size) for size in tensor.shape])
            for tensor in self.tensors.values()
        }

    def new(self, size: int, reason: str = "") -> Axis:
        """An axis of new channels, fixed for a ``reason``."""
        axis = tuple(range(len(self._same), len(self._same) + size))
        self._same += axis
        if reason:
            self.fix(axis, reason)
        return axis

    def of(self, tensor: Tensor) -> list[Axis]:
        """The axes of a parameter or buffer, with one number for all channels that were united."""
        return [tuple(map(self._first, axis)) for axis in self._stored[id(tensor)].axes]

    def _first(self, channel: int) -> int:
        same = self._same
        while same[channel] != channel:
            same[channel] = same[same[channel]]
            channel = same[channel]
        return channel

    def fixed(self, channel: int) -> str:
        """The first reason why a channel cannot be removed; "" if it can."""
        return self._fixed.get(self._first(channel), "")

    def fix(self, axis: Axis, reason: str) -> None:
        """Keep all channels of an axis."""
        for channel in map(self._first, axis):
            self._fixed.setdefault(channel, reason)

    def unite(self, one: Axis, *others: Axis) -> None:
        """Channels at equal places of axes of equal length are the same."""
        for other in others:
            for pair in zip(one, other, strict=True):
                first, second = sorted(map(self._first, pair))
                self._same[second] = first
                if second in self._fixed:
                    self._fixed.setdefault(first, self._fixed[second])

    def trace(self, example: Tensor) -> None:
        """Follow the channels through a call of the model.

        Raises:
            RuntimeError: the model cannot be traced.
        """
        program = _exported(self._model, example)
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        made: dict[fx.Node, Traced] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                stored = id(self.tensors[names[node.name]])
                made[node] = self._stored[stored]
                if node.users:
                    self.unused.discard(stored)
            elif node.op == "call_function":
                made[node] = self._called(node, made)
            else:
                why = "output" if node.op == "output" else "input"
                made[node] = self._unknown(node, made, f"the model's {why}")

    def _called(self, node: fx.Node, made: dict[fx.Node, Traced]) -> Traced:
        origin: Any = node.args[0] if node.target is operator.getitem else node
        *_, (module, _) = origin.meta.get("nn_module_stack", {"": ("", "")}).values()
        packet = getattr(origin.target, "overloadpacket", origin.target)
        name = getattr(packet, "__name__", "?").removesuffix("_")
        reason = f"{name} in {module!r}" if module else f"{name} in the model itself"
        shape = _shape(node)
        if origin is node and name in OPERATIONS and shape and all(shape):
            normalized = node.normalized_arguments(self._model, normalize_to_only_use_kwargs=True)
            if normalized is not None:
                given = fx.node.map_arg(normalized.kwargs, made.__getitem__)
                found = OPERATIONS[name](Call(self, given, shape, reason))
                if found is not None:
                    return Traced(found)
        return self._unknown(node, made, reason)

    def _unknown(self, node: fx.Node, made: dict[fx.Node, Traced], reason: str) -> Traced:
        for source in node.all_input_nodes:
            for axis in made[source].axes:
                self.fix(axis, reason)
        return Traced([self.new(size, reason) for size in _shape(node)])


def traced_axes(model: nn.Module, example: Tensor) -> Axes:
    """The axes of a model's tensors; what only its training uses is traced in training.

    The converted layers run as plain ones; afterwards the model is as it was.
    """
    modes = {module: module.training for module in model.modules()}
    layers: dict[Any, type] = {
        module: type(module) for module in modes if hasattr(module, "dense_class")
    }
    axes = Axes(model)
    try:
        for layer in layers:
            layer.__class__ = layer.dense_class
        model.eval()
        axes.trace(example)
        if axes.unused:
            model.train()
            axes.trace(example)
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind
        for module, training in modes.items():
            module.training = training
    return axes


def _shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor that a node makes; () where it makes none, or several."""
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _exported(model: nn.Module, example: Tensor) -> ExportedProgram:
    try:
        with torch.enable_grad():
            return torch.export.export(model, (example,), strict=False)
    except Exception as error:  # of the model's own code, which may be any
        first = next(iter(str(error).strip().splitlines()), "")
        raise UsageError(
            f"channels cannot be followed through {type(model).__name__}, of which torch.export "
            f"makes no graph: {type(error).__name__}: {first}"
        ) from error


class Call(NamedTuple):
    """An operation of the graph.

    Attributes:
        axes: of the model.
        given: arguments by their names in its schema, with a `Traced` for each tensor.
        shape: of the tensor that it makes.
        reason: why channels that it fixes cannot be removed.
    """

    axes: Axes
    given: Mapping[str, Any]
    shape: tuple[int, ...]
    reason: str

    @property
    def first(self) -> list[Axis]:
        """The axes of the first argument."""
        traced: Traced = next(iter(self.given.values()))
        return traced.axes

    def of(self, name: str) -> list[Axis]:
        """The axes of an argument; none where it is None."""
        traced = self.given[name]
        return [] if traced is None else traced.axes

    def fix(self, *axes: Axis) -> None:
        """Keep all channels of these axes."""
        for axis in axes:
            self.axes.fix(axis, self.reason)

    def new(self, *shape: int) -> list[Axis]:
        """New axes of channels that cannot be removed."""
        return [self.axes.new(size, self.reason) for size in shape]


Operation = Callable[[Call], list[Axis] | None]  # the result's axes; None: not known
OPERATIONS: dict[str, Operation] = {}


def _operation(names: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names.split(), function))
        return function

    return register


@_operation(
    """relu relu6 hardtanh gelu silu sigmoid tanh hardswish hardsigmoid leaky_relu elu mish clamp
    dropout feature_dropout clone contiguous detach alias to _to_copy add sub mul div copy"""
)
def _elementwise(call: Call) -> list[Axis]:
    """An element of the result from one of each tensor, broadcast."""
    tensors = [traced.axes for traced in call.given.values() if isinstance(traced, Traced)]
    result = []
    for at in range(-len(call.shape), 0):
        size = call.shape[at]
        same = [axes[at] for axes in tensors if len(axes) >= -at and len(axes[at]) == size]
        call.axes.unite(*same)
        result.append(same[0])
    return result


@_operation("conv2d")
def _convolution(call: Call) -> list[Axis]:
    maps, (out, own, *kernel), groups = call.first, call.of("weight"), call.given["groups"]
    if groups == 1:
        call.axes.unite(maps[-3], own)
    elif groups == len(maps[-3]) == len(out):  # depthwise
        call.axes.unite(maps[-3], out)
    else:
        call.fix(maps[-3], own, out)
    call.fix(*kernel, *maps[-2:])
    call.axes.unite(out, *call.of("bias"))
    return [*maps[:-3], out, *call.new(*call.shape[-2:])]


@_operation("linear")
def _linear(call: Call) -> list[Axis]:
    (*rows, channels), (out, own) = call.first, call.of("weight")
    call.axes.unite(channels, own)
    call.axes.unite(out, *call.of("bias"))
    return [*rows, out]


@_operation("batch_norm")
def _batch_norm(call: Call) -> list[Axis]:
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.axes.unite(call.first[1], *call.of(name))
    return call.first


@_operation("max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d")
def _resize(call: Call) -> list[Axis]:
    *channels, height, width = call.first
    call.fix(height, width)
    return [*channels, *call.new(*call.shape[-2:])]


@_operation("mean sum amax")
def _reduction(call: Call) -> list[Axis]:
    axes, dims = call.first, call.given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(axes))
    reduced = {dim % len(axes) for dim in dims}
    call.fix(*(axes[dim] for dim in reduced))
    if call.given.get("keepdim"):
        return [call.new(1)[0] if at in reduced else axis for at, axis in enumerate(axes)]
    return [axis for at, axis in enumerate(axes) if at not in reduced]


@_operation("view reshape flatten squeeze unsqueeze")
def _reshape(call: Call) -> list[Axis] | None:
    """Merged axes hold the channels of the first; the others are fixed. None for divided ones."""
    left, result = list(call.first), []
    for size in call.shape:
        if size == 1 and (not left or len(left[0]) > 1):
            result += call.new(1)
            continue
        while size > 1 and left and len(left[0]) == 1:
            left.pop(0)
        if not left:
            return None
        merged = left.pop(0)
        while len(merged) < size and left:
            inner = left.pop(0)
            call.fix(inner)
            merged = tuple(itertools.chain.from_iterable([c] * len(inner) for c in merged))
        if len(merged) != size:
            return None
        result.append(merged)
    return result


@_operation("cat")
def _concatenation(call: Call) -> list[Axis] | None:
    tensors = [traced.axes for traced in call.given["tensors"]]
    if len({len(axes) for axes in tensors}) > 1:  # an empty tensor among them
        return None
    dim = call.given["dim"] % len(call.shape)
    result = []
    for at, same in enumerate(zip(*tensors, strict=True)):
        if at == dim:
            result.append(tuple(itertools.chain.from_iterable(same)))
        else:
            call.axes.unite(*same)
            result.append(same[0])
    return result
