"""Models traced by torch.fx: the graph of a model, and a class whose `forward` runs one."""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fst.inference.checks import is_hooked, is_watched

KEPT = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)  # calls of these are single nodes of a graph
FROZEN_NORM = "FrozenBatchNorm2d"  # torchvision's, with the buffers of a batch norm
NOTHING = (nn.Dropout, nn.Dropout2d, nn.Identity)  # do nothing in evaluation
VIEWS = ("view", "reshape", "flatten", "unflatten", "ravel", "contiguous")  # or copies
IN_EVALUATION_NOTHING = ("dropout", "stochastic_depth")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
PLAIN = (*FUNCTIONS, bool, int, float, str, type(None), torch.dtype, torch.device)
State = dict[str, dict[str, Any]]  # plain attributes of modules, by name
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Seen:
    """The facts that a trace has seen of a model, on which its graph depends.

    Attributes:
        hooks: of the modules within the model.
        children: of each module, by name; ``known`` as they were.
        read: attributes that the model's code has read: module, name, value.
    """

    def __init__(self, model: nn.Module, read: list[tuple[nn.Module, str, Any]]) -> None:
        self.modules, self.read = list(model.modules()), read
        inner = self.modules[1:]
        self.hooks = [h for m in inner for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.children = [module._modules for module in self.modules]
        self.known = [dict(children) for children in self.children]

    def holds(self) -> bool:
        """True if the model is as it was, in evaluation mode, and no hook is within it."""
        if any(self.hooks) or self.children != self.known:
            return False
        if any(module.training for module in self.modules):
            return False
        now = (getattr(module, name) for module, name, _ in self.read)
        return all(_is_plain(a) and a == b for a, (_, _, b) in zip(now, self.read, strict=True))


class Trace(NamedTuple):
    """The graph of a model, and what it depends on."""

    graph: fx.Graph
    seen: Seen


class TracedModel(nn.Module):
    """Base class, with the model's own class, of models that run a graph; other methods stay.

    Python's branches on arguments that are no tensors are those of one form of call. A call of
    another form, and one after a change of what the trace has seen, runs the model's own code.

    Attributes:
        form: of the call for which the graph computes the model.
        seen: what the graph depends on.
        written: the arguments of `_traced_class`.
    """

    form: Any
    seen: Seen
    written: tuple[Any, ...]

    def _is_as_traced(self, arguments: tuple[Any, ...]) -> bool:
        if torch.compiler.is_compiling():
            return not torch.is_autocast_enabled("cpu")
        return not is_watched() and _form_of(arguments) == self.form and self.seen.holds()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made again from its source."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_traced, self.written, *reduced[2:]


def run_graph(
    model: nn.Module, trace: Trace, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Change the class of ``model`` to one that runs the graph, for calls like this one."""
    for node in trace.graph.nodes:
        node.type = None  # annotations may be strings
    code = trace.graph.python_code("self")
    definition, body = code.src[code.src.index("def forward") :].split("\n", 1)
    signature = inspect.signature(type(model).forward)
    _, *parameters = signature.parameters.values()  # fx calls the first one self
    names = [p.name for p in parameters]
    given = [
        f"{p.name}={p.name}"
        if p.kind is p.KEYWORD_ONLY
        else str(p.replace(annotation=p.empty, default=p.empty))
        for p in parameters
    ]
    source = (
        f"{definition}\n"
        f"    if not self._is_as_traced(({', '.join([*names, ''])})):\n"
        f"        return own_forward({', '.join(['self', *given])})\n{body}"
    )
    modules = {n: v.__name__ for n, v in code.globals.items() if isinstance(v, types.ModuleType)}
    values = {n: v for n, v in code.globals.items() if n not in modules}
    written = (type(model), source, modules, values)
    model.__class__ = _traced_class(*written)
    assert isinstance(model, TracedModel)  # its class has just become one
    bound = signature.bind(model, *arguments, **named)
    bound.apply_defaults()
    form = _form_of(tuple(bound.arguments[name] for name in names))
    model.__dict__.update(form=form, seen=trace.seen, written=written)


def _traced_class(
    base: type[nn.Module], source: str, modules: dict[str, str], values: dict[str, Any]
) -> type[nn.Module]:
    found = {name: importlib.import_module(of) for name, of in modules.items()}
    found |= values | {"own_forward": base.forward}
    exec(source, found)
    members = {"forward": found["forward"], "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (TracedModel, base), members)


def _new_traced(*written: Any) -> nn.Module:
    made = _traced_class(*written)
    return made.__new__(made)


def _form_of(value: Any) -> Any:
    """The kinds of tensors and numbers instead of values."""
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, tuple | list):
        return [type(value), *map(_form_of, value)]
    if isinstance(value, dict):
        return {name: _form_of(entry) for name, entry in value.items()}
    return value if value is None or isinstance(value, bool | str) else type(value)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else what is made of a buffer is kept as it was

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        is_kept = isinstance(module, KEPT) or type(module).__name__ == FROZEN_NORM
        return is_kept or super().is_leaf_module(module, name)


def trace(model: nn.Module) -> Trace | None:
    """The graph of a model in evaluation mode; None where it cannot be traced."""
    copied = copy.deepcopy(model)  # its code may keep what the tracer gives it
    try:
        before = _attributes(copied)
        with _reading(copied) as read:
            graph = _Tracer().trace(copied)
        if not _equal(before, _attributes(copied)):
            return None  # a graph would not keep what the model does
    except Exception:  # a model is code that can fail in any way on what a tracer gives it
        return None
    for name, value in vars(copied).items():
        if name.startswith("_tensor_constant"):
            setattr(model, name, value)
    modules = dict(model.named_modules())
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    if any(is_hooked(modules[name]) for name in modules.keys() - called - {""}):
        return None  # the trace went past the hook
    if _writes_to_viewed_memory(graph, modules):
        return None  # graphs compute in channels_last, where it may be a copy
    _erase_nothing(graph, modules)
    values = [(modules[name], key, value) for (name, key), value in read.items()]
    return Trace(graph, Seen(model, values))


def writes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if a node may change its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = _name_of(node, modules)
    is_operator = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i")
    named = node.kwargs.get("inplace") or node.kwargs.get("out") is not None
    return node.op.startswith("call") and (is_operator or name.endswith("_") or bool(named))


def _writes_to_viewed_memory(graph: fx.Graph, modules: dict[str, nn.Module]) -> bool:
    """True if what a node writes to is a view of something, or has one, in one memory format."""
    past: set[fx.Node] = set()
    for node in graph.nodes:
        if node.args and isinstance(node.args[0], fx.Node) and writes(node, modules):
            near = {node.args[0], *(past & node.args[0].users.keys())}
            if any(_name_of(one, modules) in VIEWS for one in near):
                return True
        past.add(node)
    return False


def _name_of(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__.lower()
    return node.target if isinstance(node.target, str) else node.target.__name__


def _attributes(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """The values that a model's code may write, with those in containers."""
    return {
        f"{name}.{key}": (value, repr(value) if isinstance(value, list | dict | set) else "")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in OF_EVERY_MODULE and not key.startswith("_tensor_constant")  # the tracer's
    }


def python_state(model: nn.Module) -> State:
    """Copies of the plain attributes of a model's modules, which its code may change."""
    return {
        name: {
            key: copy.deepcopy(value)
            for key, value in vars(module).items()
            if key not in OF_EVERY_MODULE and _is_plain(value)
        }
        for name, module in model.named_modules()
    }


def restore(model: nn.Module, state: State) -> None:
    """Set the attributes of `python_state` again."""
    for name, module in model.named_modules():
        vars(module).update(copy.deepcopy(state.get(name, {})))


def _equal(before: dict[str, tuple[Any, str]], after: dict[str, tuple[Any, str]]) -> bool:
    return before.keys() == after.keys() and all(
        value is after[name][0] and text == after[name][1] for name, (value, text) in before.items()
    )


@contextmanager
def _reading(model: nn.Module) -> Iterator[dict[tuple[str, str], Any]]:
    """Plain attributes of a model's modules that are read while the block runs."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[tuple[str, str], Any] = {}

    def read(module: nn.Module, key: str) -> Any:
        value = object.__getattribute__(module, key)
        if id(module) in names and key not in OF_EVERY_MODULE and key[:2] != "__":
            if _is_plain(value):
                found.setdefault((names[id(module)], key), copy.deepcopy(value))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


def _erase_nothing(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Erase calls that do nothing in evaluation."""
    for node in list(graph.nodes):
        if not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.op == "call_module":
            module = modules[node.target]
            does_nothing = type(module) in NOTHING and not is_hooked(module)
        else:
            values = (*node.args, node.kwargs.get("training"))
            name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            does_nothing = name in IN_EVALUATION_NOTHING and any(v is False for v in values)
        if does_nothing:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
