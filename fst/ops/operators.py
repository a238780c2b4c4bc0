"""Functions as operators of torch (``torch.ops.fst``), which torch.compile takes as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake

_OPERATORS = Library("fst", "FRAGMENT")


def register(
    name: str,
    function: Callable[..., Any],
    like: Callable[..., Any],
    device: str = "CompositeExplicitAutograd",
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """The operator ``torch.ops.fst.NAME`` that calls ``function``.

    PyTorch's own decorator `custom_op` makes four further Python calls per call, for operators that
    autograd differentiates.

    Args:
        like: makes empty results, for compilers; it takes the arguments of ``function`` by name,
            and only those that it needs.
        device: the dispatch key, "CPU" for kernels of that device alone.
    """
    signature, wanted = inspect.signature(function), inspect.signature(like).parameters

    def fake(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        return like(**{name: given[name] for name in wanted})

    typed = inspect.unwrap(function, stop=lambda f: hasattr(f, "__signature__"))
    _OPERATORS.define(name + infer_schema(typed, mutates_args=()), tags=tuple(tags))
    _OPERATORS.impl(name, function, device)
    register_fake(f"fst::{name}", fake, lib=_OPERATORS)
    return getattr(torch.ops.fst, name).default


class Planned:
    """An operator, ``torch.ops.fst.NAME``, or ``NAME_cpp`` of CPU tensors alone.

    Its arguments but the first ones, which are tensors, and the form of these are checked once for
    all calls of one form. Its kernel reads operands where they are: compilers must not move them.
    """

    def __init__(
        self,
        plan: Callable[..., Callable[..., Any]],
        like: Callable[..., Any],
        tensors: int,
        returns: str,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        """Register the operator.

        Args:
            plan: checks the operator's arguments, and returns a function of the first ``tensors``.
            like: see `register`.
            returns: the annotation of the result.
            devices: on which its tensors may be.
        """
        signature = inspect.signature(plan)

        def run(*arguments: Any, **named: Any) -> Any:
            if named:
                given = signature.bind(*arguments, **named)
                given.apply_defaults()
                arguments = given.args
            return plan(*arguments)(*arguments[:tensors])

        run.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        tags = (torch.Tag.needs_fixed_stride_order,)
        name, key = f"{plan.__name__}_cpp", "CPU"
        if devices != ("cpu",):
            name, key = plan.__name__, "CompositeExplicitAutograd"
        self._operator = register(name, run, like, key, tags)
        self._plan, self._tensors, self._devices = plan, tensors, devices
        functools.update_wrapper(self, plan)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator once."""
        return self._operator(*arguments, **named)

    def plan(self, *arguments: Any) -> Callable[..., Any]:
        """The operator as a function of its tensors, for others of the form of these.

        It is the kernel itself, as PyTorch's dispatcher takes longer than a small product, unless
        `are_watched`.
        """
        tensors, rest = arguments[: self._tensors], arguments[self._tensors :]
        if are_watched(tensors, self._devices):
            return lambda *given: self._operator(*given, *rest)
        return self._plan(*arguments)


def surroundings() -> tuple[bool, ...]:
    """True for each of modes, transforms, a tracer and a profiler that want to see operators; and
    where algorithms must be deterministic. No Python call is made for it.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0,
        torch._C._are_functorch_transforms_active(),
        torch._C._get_tracing_state() is not None,
        torch.autograd._profiler_enabled(),
        torch._C._get_deterministic_algorithms(),
    )


def are_watched(tensors: Sequence[Any], devices: Sequence[str]) -> bool:
    """True where a compiler, a mode, a transform, a tracer, a profiler or a tensor of another kind
    or on another device wants to see operators.
    """
    if torch.compiler.is_compiling() or any(surroundings()[:-1]):
        return True
    given = [x for x in tensors if isinstance(x, Tensor)]
    return not all([type(x) is Tensor and x.device.type in devices for x in given])
