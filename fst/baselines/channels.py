"""Which axes of a model's parameters and buffers hold the same channels, from its traced graph.

An axis is the number of the channel at each of its elements: a map (C, H, W) flattened has each
number H·W times. torch.export gives the operations of a call, in their order. Each unites the
channels that it pairs, and fixes those whose number or place matters to it. An operation that is
not in `OPERATIONS` fixes all channels that it reads and makes; so do inputs and outputs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fst.basics.errors import UsageError

Axis = tuple[int, ...]
Shape = tuple[int, ...]
Traced = list[Axis]  # a tensor of the graph, by its axes


class Axes:
    """The channels of all tensors of a model.

    Attributes:
        tensors: the parameters and buffers by name.
        unused: the ids of those with channels that no traced call has used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._same: list[int] = []  # channel -> itself, or one before it that it was united with
        self._fixed: dict[int, str] = {}
        self._reason = ""  # why channels that the operation under way fixes cannot be removed
        self._model = model
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self.unused = {id(tensor) for tensor in self.tensors.values() if tensor.dim()}
        self._stored = {id(tensor): self._new(tensor.shape) for tensor in self.tensors.values()}

    def _new(self, shape: Shape) -> Traced:
        ends = [len(self._same) + end for end in itertools.accumulate(shape)]
        self._same += range(len(self._same), ends[-1] if ends else len(self._same))
        return [tuple(range(end - size, end)) for end, size in zip(ends, shape, strict=True)]

    def of(self, tensor: Tensor) -> Traced:
        """The axes of a parameter or buffer, with one number for all channels that were united."""
        return [tuple(map(self._first, axis)) for axis in self._stored[id(tensor)]]

    def _first(self, channel: int) -> int:
        same = self._same
        while same[channel] != channel:
            same[channel] = same[same[channel]]
            channel = same[channel]
        return channel

    def fixed(self, channel: int) -> str:
        """The first reason why a channel cannot be removed; "" if it can."""
        return self._fixed.get(self._first(channel), "")

    def fix(self, *axes: Axis) -> None:
        """Keep all channels of these axes."""
        for channel in itertools.chain.from_iterable(axes):
            self._fixed.setdefault(self._first(channel), self._reason)

    def new(self, *shape: int) -> Traced:
        """New axes of channels that cannot be removed."""
        made = self._new(shape)
        self.fix(*made)
        return made

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
            if node.name in names:
                stored = id(self.tensors[names[node.name]])
                made[node] = self._stored[stored]
                if node.users:
                    self.unused.discard(stored)
            else:
                made[node] = self._made(node, made)

    def _made(self, node: fx.Node, made: dict[fx.Node, Traced]) -> Traced:
        """The axes of what a node makes of others."""
        shape = tuple(getattr(node.meta.get("val"), "shape", ()))  # () of several tensors
        self._reason = "the model's " + ("output" if node.op == "output" else "input")
        if node.op == "call_function":
            origin: Any = node.args[0] if node.target is operator.getitem else node
            *_, (module, _) = origin.meta.get("nn_module_stack", {"": ("", "")}).values()
            packet = getattr(origin.target, "overloadpacket", origin.target)
            name = getattr(packet, "__name__", "?").removesuffix("_")
            self._reason = f"{name} in " + (repr(module) if module else "the model itself")
            if origin is node and name in OPERATIONS and shape and all(shape):
                given = node.normalized_arguments(self._model, normalize_to_only_use_kwargs=True)
                if given is not None:
                    found = fx.node.map_arg(given.kwargs, made.__getitem__)
                    if (result := OPERATIONS[name](self, shape, **found)) is not None:
                        return result
        for source in node.all_input_nodes:
            self.fix(*made[source])
        return self.new(*shape)


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


# Of the axes, the result's shape, and arguments by their names in the schema, with a `Traced` for
# each tensor, the axes of the result; None where they are not known.
Operation = Callable[..., Traced | None]
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
def _elementwise(axes: Axes, shape: Shape, **given: Any) -> Traced:
    """An element of the result from one of each tensor, broadcast."""
    tensors = [value for value in given.values() if isinstance(value, list)]
    result = []
    for at in range(-len(shape), 0):
        same = [of[at] for of in tensors if len(of) >= -at and len(of[at]) == shape[at]]
        axes.unite(*same)
        result.append(same[0])
    return result


@_operation("conv2d")
def _convolution(
    axes: Axes, shape: Shape, input: Traced, weight: Traced, groups: int, **given: Any
) -> Traced:
    (*images, channels, height, width), (out, own, *kernel) = input, weight
    if groups == 1:
        axes.unite(channels, own)
    elif groups == len(channels) == len(out):  # depthwise
        axes.unite(channels, out)
    else:
        axes.fix(channels, own, out)
    axes.fix(*kernel, height, width)
    axes.unite(out, *(given["bias"] or ()))
    return [*images, out, *axes.new(*shape[-2:])]


@_operation("linear")
def _linear(axes: Axes, _: Shape, input: Traced, weight: Traced, bias: Traced | None) -> Traced:
    (*rows, channels), (out, own) = input, weight
    axes.unite(channels, own)
    axes.unite(out, *(bias or ()))
    return [*rows, out]


@_operation("batch_norm")
def _batch_norm(axes: Axes, _: Shape, input: Traced, **given: Any) -> Traced:
    for name in ("weight", "bias", "running_mean", "running_var"):
        axes.unite(input[1], *(given[name] or ()))
    return input


@_operation("max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d")
def _resize(axes: Axes, shape: Shape, input: Traced, **_: Any) -> Traced:
    *channels, height, width = input
    axes.fix(height, width)
    return [*channels, *axes.new(*shape[-2:])]


@_operation("mean sum amax")
def _reduction(axes: Axes, _: Shape, input: Traced, **given: Any) -> Traced:
    dim = given.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or range(len(input))
    reduced = {at % len(input) for at in dims}
    axes.fix(*(input[at] for at in reduced))
    if given.get("keepdim"):
        return [axes.new(1)[0] if at in reduced else axis for at, axis in enumerate(input)]
    return [axis for at, axis in enumerate(input) if at not in reduced]


@_operation("view reshape flatten squeeze unsqueeze")
def _reshape(axes: Axes, shape: Shape, input: Traced, **_: Any) -> Traced | None:
    """Merged axes hold the channels of the first; the others are fixed. None for divided ones."""
    left, result = list(input), []
    for size in shape:
        if size == 1 and (not left or len(left[0]) > 1):
            result += axes.new(1)
            continue
        while size > 1 and left and len(left[0]) == 1:
            left.pop(0)
        if not left:
            return None
        merged = left.pop(0)
        while len(merged) < size and left:
            inner = left.pop(0)
            axes.fix(inner)
            merged = tuple(itertools.chain.from_iterable([c] * len(inner) for c in merged))
        if len(merged) != size:
            return None
        result.append(merged)
    return result


@_operation("cat")
def _concatenation(axes: Axes, shape: Shape, tensors: list[Traced], dim: int) -> Traced | None:
    if len({len(of) for of in tensors}) > 1:  # an empty tensor among them
        return None
    result = []
    for at, same in enumerate(zip(*tensors, strict=True)):
        if at == dim % len(shape):
            result.append(tuple(itertools.chain.from_iterable(same)))
        else:
            axes.unite(*same)
            result.append(same[0])
    return result
