"""The effect of operations on channels: which axes of their tensors hold the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fst.channels.axes import Axes, Axis, times


class Traced(NamedTuple):
    """A tensor of the graph, by its axes."""

    axes: list[Axis]


class Call(NamedTuple):
    """An operation of the graph.

    Attributes:
        axes: of the model.
        name: of the operation in ATen, without "_" and overload.
        given: arguments by their names in its schema, with a `Traced` for each tensor.
        shapes: of the tensors that it makes.
        reason: why channels that it takes apart stay in place.
    """

    axes: Axes
    name: str
    given: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    reason: str

    @property
    def first(self) -> list[Axis]:
        """The axes of the first argument."""
        traced: Traced = next(iter(self.given.values()))
        return traced.axes

    def of(self, name: str) -> list[Axis]:
        """The axes of an argument; none where it is None, or there is none of that name."""
        traced = self.given.get(name)
        return [] if traced is None else traced.axes

    def unite(self, axis: Axis, *others: Axis) -> None:
        """All these axes hold the same channels."""
        for other in others:
            self.axes.unite(axis, other)

    def pin(self, *axes: Axis) -> None:
        """Leave axes in place."""
        for axis in axes:
            self.axes.pin(axis, self.reason)

    def count(self, *axes: Axis) -> None:
        """The numbers of channels of axes matter."""
        for axis in axes:
            self.axes.count(axis, self.reason)

    def new(self, *shape: int) -> list[Axis]:
        """New axes that stay in place."""
        return [self.axes.new(size, self.reason) for size in shape]


Found = list[list[Axis]] | None  # the axes of each tensor that is made; None: not known
OPERATIONS: dict[str, Callable[[Call], Found]] = {}


def _operation(names: str) -> Callable[[Callable[[Call], Found]], Callable[[Call], Found]]:
    def register(function: Callable[[Call], Found]) -> Callable[[Call], Found]:
        OPERATIONS.update(dict.fromkeys(names.split(), function))
        return function

    return register


@_operation(
    """relu relu6 hardtanh gelu silu sigmoid tanh hardswish hardsigmoid leaky_relu elu celu selu
    mish softplus softsign exp log sqrt rsqrt reciprocal square abs neg erf clamp clamp_min
    clamp_max dropout feature_dropout alpha_dropout bernoulli clone contiguous detach alias to
    _to_copy add sub rsub mul div pow maximum minimum where copy"""
)
def _elementwise(call: Call) -> Found:
    """An element of the result from one of each tensor, broadcast."""
    tensors = [traced.axes for traced in call.given.values() if isinstance(traced, Traced)]
    shape, result = call.shapes[0], []
    for at in range(-len(shape), 0):
        here = [axes[at] for axes in tensors if len(axes) >= -at]
        long = [axis for axis in here if len(axis) == shape[at]] or call.new(shape[at])
        call.unite(*long)
        result.append(long[0])
    return [result]


@_operation("softmax log_softmax")
def _softmax(call: Call) -> Found:
    call.count(call.first[call.given["dim"]])
    return [call.first]


@_operation("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def _convolution(call: Call) -> Found:
    maps, weight, bias = call.of("input"), call.of("weight"), call.of("bias")
    channel, groups = len(maps) - len(weight) + 1, call.given["groups"]
    out, own = weight[:2] if "transpose" not in call.name else weight[1::-1]
    each = len(out) // groups
    if groups == 1:
        call.unite(maps[channel], own)
    elif len(maps[channel]) == groups and own == weight[1]:  # depthwise
        call.unite(times(maps[channel], each), out)
    else:
        reason = f"the {groups} groups of {call.reason}"
        for axis in (maps[channel], out, own):
            call.axes.pin(axis, reason)
    call.pin(*weight[2:], *maps[channel + 1 :])
    call.unite(out, *bias)
    return [[*maps[:channel], out, *call.new(*call.shapes[0][channel + 1 :])]]


@_operation("linear")
def _linear(call: Call) -> Found:
    rows, weight = call.of("input"), call.of("weight")
    call.unite(rows[-1], weight[-1])
    call.unite(weight[0], *call.of("bias"))
    return [[*rows[:-1], *weight[:-1]]]


@_operation("batch_norm instance_norm")
def _batch_norm(call: Call) -> Found:
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.unite(call.first[1], *call.of(name))
    return [call.first]


@_operation("layer_norm rms_norm")
def _layer_norm(call: Call) -> Found:
    call.count(*call.first[-len(call.given["normalized_shape"]) :])
    for name in ("weight", "bias"):
        for axis, own in zip(call.first[::-1], call.of(name)[::-1], strict=False):
            call.unite(axis, own)
    return [call.first]


@_operation("prelu")
def _prelu(call: Call) -> Found:
    if len(call.of("weight")[0]) != 1:
        call.unite(call.first[1], *call.of("weight"))
    return [call.first]


@_operation(
    """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d"""
)
def _resize(call: Call) -> Found:
    """Positions are the last axes; channels stay apart."""
    axes, positions = call.first, int(call.name[-2])
    call.pin(*axes[-positions:])
    return [axes[:-positions] + call.new(*call.shapes[0][-positions:])]


@_operation("pad constant_pad_nd")
def _pad(call: Call) -> Found:
    axes, pad = list(call.first), call.given["pad"]
    for at, both in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if any(both):
            call.pin(axes[-1 - at])
            axes[-1 - at] = call.new(call.shapes[0][-1 - at])[0]
    return [axes]


@_operation("mean sum amax amin var std")
def _reduction(call: Call) -> Found:
    """The order of what is reduced does not matter."""
    axes, dims = call.first, call.given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(axes))
    reduced = {dim % len(axes) for dim in dims}
    call.count(*(axes[dim] for dim in reduced))
    if call.given.get("keepdim"):
        return [[call.new(1)[0] if at in reduced else axis for at, axis in enumerate(axes)]]
    return [[axis for at, axis in enumerate(axes) if at not in reduced]]


@_operation("view _unsafe_view reshape flatten unflatten squeeze unsqueeze reshape_as view_as")
def _reshape(call: Call) -> Found:
    return [call.axes.reshaped(call.first, call.shapes[0], call.reason)]


@_operation("transpose swapaxes t permute")
def _transpose(call: Call) -> Found:
    axes, order = call.first, list(range(len(call.first)))
    if call.name == "permute":
        order = [dim % len(axes) for dim in call.given["dims"]]
    elif call.name == "t":
        order.reverse()
    else:
        one, other = list(call.given.values())[1:]
        order[one], order[other] = order[other], order[one]
    return [[axes[at] for at in order]]


@_operation("expand expand_as")
def _expand(call: Call) -> Found:
    result = call.new(*call.shapes[0])
    for at, axis in enumerate(call.first[::-1], start=1):
        if len(axis) == call.shapes[0][-at]:
            result[-at] = axis
    return [result]


@_operation("cat concat")
def _concatenation(call: Call) -> Found:
    tensors = [traced.axes for traced in call.given["tensors"]]
    result, dim = list(tensors[0]), call.given["dim"]
    if len({len(axes) for axes in tensors}) > 1:  # empty ones are left out
        return None
    for at in range(len(result)):
        if at != dim % len(result):
            call.unite(*(axes[at] for axes in tensors))
    result[dim] = tuple(itertools.chain.from_iterable(axes[dim] for axes in tensors))
    return [result]


@_operation("chunk split split_with_sizes")
def _split(call: Call) -> Found:
    axes, dim = call.first, call.given["dim"]
    ends = itertools.accumulate((shape[dim] for shape in call.shapes), initial=0)
    parts = [_part(call, dim, start, end) for start, end in itertools.pairwise(ends)]
    return [_with(axes, dim, part) for part in parts]


@_operation("slice narrow")
def _slice(call: Call) -> Found:
    axes, dim, size = call.first, call.given["dim"], len(call.first[call.given["dim"]])
    start, step = call.given["start"] or 0, call.given.get("step", 1)
    if step != 1 or not isinstance(start, int):
        return None
    start = min(size, start + size if start < 0 else start)
    part = _part(call, dim, start, start + call.shapes[0][dim])
    return [_with(axes, dim, part)]


@_operation("select unbind")
def _select(call: Call) -> Found:
    axes, dim = list(call.first), call.given["dim"]
    call.pin(axes.pop(dim))
    return [axes] * len(call.shapes)


def _part(call: Call, dim: int, start: int, end: int) -> Axis:
    call.count(call.first[dim])
    return call.axes.part(call.first[dim], start, end, call.reason)


def _with(axes: Sequence[Axis], dim: int, axis: Axis) -> list[Axis]:
    return [axis if at == dim % len(axes) else own for at, own in enumerate(axes)]
