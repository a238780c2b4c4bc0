"""Which axes of a model's parameters and buffers hold the same channels, from its traced graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fst.basics.errors import UsageError
from fst.channels.axes import Axes, Axis
from fst.channels.operations import OPERATIONS, Call, Traced
from fst.layers.calls import in_eval_mode


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Plain layers in eval mode, for the time of the block."""
    layers = {m: type(m) for m in model.modules() if hasattr(m, "dense_class")}
    for layer in layers:
        layer.__class__ = layer.dense_class
    try:
        with in_eval_mode(model):
            yield
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind


class ModelAxes(Axes):
    """The axes of all tensors of a model.

    torch.export gives the operations of a call on an example, in their order. An operation that
    is not in `OPERATIONS` leaves the channels of all its tensors in place; so do the model's inputs
    and outputs.

    Attributes:
        tensors: the parameters and buffers by name.
        unused: names of the parameters, and of buffers with channels, that no traced call has used.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.unused = [name for name, _ in model.named_parameters()]
        self.unused += [name for name, buffer in model.named_buffers() if buffer.dim()]
        self._model = model
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self._stored = {
            id(tensor): Traced([self.new(size) for size in tensor.shape])
            for tensor in self.tensors.values()
        }

    def __iter__(self) -> Iterator[tuple[Tensor, list[Axis]]]:
        """Each parameter and buffer once, and its axes."""
        for tensor in {id(tensor): tensor for tensor in self.tensors.values()}.values():
            yield tensor, self.of(tensor)

    def of(self, tensor: Tensor) -> list[Axis]:
        """The axes of a parameter or buffer."""
        return [self.now(axis) for axis in self._stored[id(tensor)].axes]

    def trace(self, inputs: tuple[Any, ...], *, training: bool = False) -> None:
        """Follow the channels through a call of the model, which is in eval mode.

        Args:
            inputs: of the call.
            training: whether to set it to training for the call.

        Raises:
            RuntimeError: the model cannot be traced.
        """
        self._model.train(training)
        program = _exported(self._model, inputs)
        self._model.eval()
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        made: dict[fx.Node, list[Traced]] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                made[node] = [self._stored[id(self.tensors[names[node.name]])]]
            elif node.op == "call_function":
                made[node] = self._called(node, made)
            else:
                why = "output" if node.op == "output" else "input"
                made[node] = self._stay(node, made, f"the model's {why}")
        used = [names[n.name] for n in program.graph.nodes if n.users and n.name in names]
        found = {id(self.tensors[name]) for name in used}
        self.unused = [name for name in self.unused if id(self.tensors[name]) not in found]

    def _called(self, node: fx.Node, made: dict[fx.Node, list[Traced]]) -> list[Traced]:
        if node.target is operator.getitem:
            source, index = node.args
            return [made[source][index]]  # type: ignore[index]
        *_, (module, _) = node.meta.get("nn_module_stack", {"": ("", "")}).values()
        where = f"in {module!r}" if module else "in the model itself"
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._stay(node, made, f"{getattr(node.target, '__name__', '?')} {where}")
        name = node.target.overloadpacket.__name__.removesuffix("_")
        schema = node.target._schema.arguments
        given = {argument.name: argument.default_value for argument in schema}
        given.update(zip(given, node.args, strict=False))
        given.update(node.kwargs)
        shapes = [tuple(tensor.shape) for tensor in _tensors(node)]
        if name in OPERATIONS and shapes and all(map(all, shapes)):
            arguments = {
                key: fx.node.map_arg(value, lambda source: made[source][0])
                for key, value in given.items()
            }
            call = Call(self, name, arguments, shapes, f"{name} {where}")
            found = OPERATIONS[name](call)
            if found is not None:
                return [Traced(axes) for axes in found]
        return self._stay(node, made, f"{name} {where}")

    def _stay(self, node: fx.Node, made: dict[fx.Node, list[Traced]], reason: str) -> list[Traced]:
        """Leave all that a node reads and makes in place."""
        for source in node.all_input_nodes:
            for traced in made[source]:
                for axis in traced.axes:
                    self.pin(axis, reason)
        shapes = [tensor.shape for tensor in _tensors(node)]
        return [Traced([self.new(size, reason) for size in shape]) for shape in shapes]


def traced(model: nn.Module, inputs: tuple[Any, ...]) -> ModelAxes:
    """The axes of a model's tensors; what only its training uses, is traced in training."""
    axes = ModelAxes(model)
    axes.trace(inputs)
    if axes.unused:
        axes.trace(inputs, training=True)
    return axes


def _tensors(node: fx.Node) -> list[Tensor]:
    """Stand-ins of the tensors that a node makes."""
    made = node.meta.get("val")
    parts = made if isinstance(made, list | tuple) else [made]
    return [part for part in parts if isinstance(part, Tensor)]


def _exported(model: nn.Module, inputs: tuple[Any, ...]) -> ExportedProgram:
    """The operations of a call; the model runs on stand-ins of tensors."""
    entered: list[str] = []
    with _named_calls(model, entered):
        try:
            return torch.export.export(model, inputs, strict=False)
        except Exception as error:  # of the model's own code, which may be any
            name = f"module {entered[-1]!r} of " if entered and entered[-1] else ""
            first = next(iter(str(error).strip().splitlines()), "")
            raise UsageError(
                f"channels cannot be followed through {name}{type(model).__name__}, of "
                f"which torch.export makes no graph: {type(error).__name__}: {first}"
            ) from error


@contextmanager
def _named_calls(model: nn.Module, entered: list[str]) -> Iterator[None]:
    """Names of the modules whose forward pass is under way, the innermost last."""

    def leave(*_: object) -> None:
        entered.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: entered.append(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
