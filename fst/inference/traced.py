"""Models traced by torch.fx: the graph of a model, and a `forward` that runs one."""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fst.layers.checks import is_hooked

KEPT = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)  # subclasses of which are not traced into
FROZEN_NORM = "FrozenBatchNorm2d"  # torchvision's, with the buffers of a batch norm


class TracedForward:
    """The ``forward`` of a model that was traced; the model's other methods stay what they are.

    It is an attribute of the model, and is copied and pickled with it, as source. Python's branches
    on arguments that are no tensors are those of one form of call.

    Attributes:
        model: whose modules the graph calls.
        source: of a function ``forward(self, ...)``.
        modules: names of the modules that the source names.
        values: anything else that it names.
        form: of the call for which it computes the model.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        for node in graph.nodes:
            node.type = None  # annotations may be strings
        code = graph.python_code("self")
        self.model = model
        self.source = code.src[code.src.index("def forward") :]
        self.modules, self.values = {}, {}
        for name, value in code.globals.items():
            if isinstance(value, types.ModuleType):
                self.modules[name] = value.__name__
            else:
                self.values[name] = value
        self._compile()
        self.form = self._form(arguments, named)

    def _compile(self) -> None:
        found = {name: importlib.import_module(of) for name, of in self.modules.items()}
        found |= self.values
        exec(self.source, found)
        self.function: Callable[..., Any] = found["forward"]  # type: ignore[assignment]
        self.__code__ = self.function.__code__  # as torch.export reads it of a method
        self.__signature__ = inspect.signature(types.MethodType(self.function, self.model))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the model, by its own code where the call has another form."""
        if torch.compiler.is_compiling() or self._form(arguments, named) == self.form:
            return self.function(self.model, *arguments, **named)
        return type(self.model).forward(self.model, *arguments, **named)

    def _form(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The arguments by name, with the kinds of tensors and numbers instead of values."""
        try:
            bound = self.__signature__.bind(*arguments, **named)
        except TypeError:  # the model's own code says what is missing
            return None
        bound.apply_defaults()
        return pytree.tree_map(_kind, dict(bound.arguments))

    def __getstate__(self) -> dict[str, Any]:
        """The source stands for the function."""
        made = ("function", "__code__", "__signature__")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    is_known = value is None or isinstance(value, bool | str)
    return repr(value) if is_known else type(value).__qualname__


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else what is made of a buffer is kept as it was

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        is_kept = isinstance(module, KEPT) or type(module).__name__ == FROZEN_NORM
        return is_kept or super().is_leaf_module(module, name)


def trace(model: nn.Module) -> fx.Graph | None:
    """The graph of a model in evaluation mode; None where it cannot be traced."""
    copied = copy.deepcopy(model)  # its code may keep what the tracer gives it
    try:
        graph = _Tracer().trace(copied)
    except Exception:  # a model is code that can fail in any way on what a tracer gives it
        return None
    if any(_has_proxy(vars(module)) for module in copied.modules()):
        return None  # a graph would not keep what the model does
    for name, value in vars(copied).items():
        if name.startswith("_tensor_constant"):  # the tracer's names of tensors from elsewhere
            setattr(model, name, value)
    inner = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        if is_hooked(module) and module is not model and name not in inner:
            return None  # the trace went past the hook
    return graph


def _has_proxy(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_proxy(entry) for key, entry in value.items() if key != "_modules")
    if isinstance(value, list | tuple | set):
        return any(map(_has_proxy, value))
    return isinstance(value, fx.Proxy)
