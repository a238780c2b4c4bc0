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
    autograd differentiates. On a CPU a call that nobody watches is one of ``function`` itself, as
    PyTorch's dispatcher takes longer than a small product.

    Args:
        like: makes empty results, for compilers; it takes the arguments of ``function`` by name,
            and only those that it needs.
        device: the dispatch key, "CPU" for kernels of that device alone.
    """
    signature, wanted = inspect.signature(function), inspect.signature(like).parameters

    def fake(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        return like(**{name: given[name] for name in wanted})

    schema = infer_schema(inspect.unwrap(function), mutates_args=())
    _OPERATORS.define(name + schema, tags=tuple(tags))
    _OPERATORS.impl(name, function, device)
    register_fake(f"fst::{name}", fake, lib=_OPERATORS)
    operator = getattr(torch.ops.fst, name).default
    if device != "CPU":
        return operator

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if _is_watched((*arguments, *named.values())):
            return operator(*arguments, **named)
        return function(*arguments, **named)

    return run


def _is_watched(arguments: Sequence[Any]) -> bool:
    """True where a compiler, a mode, a transform, a profiler or a tensor of another kind or device
    wants to see operators.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or any(isinstance(x, Tensor) and not (type(x) is Tensor and x.is_cpu) for x in arguments)
    )
