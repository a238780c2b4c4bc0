"""Where the operators ask which backend computes an operation on these operands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from fst.backends import autotune, registry

Result = TypeVar("Result")
Record = dict[str, autotune.Decision]


class _Running(threading.local):
    """Where this thread notes its decisions."""

    record: Record | None = None


_RUNNING = _Running()


class _Recording:
    __slots__ = ("_before", "_record")

    def __init__(self, record: Record | None) -> None:
        self._record = record

    def __enter__(self) -> None:
        self._before = _RUNNING.record
        _RUNNING.record = self._record

    def __exit__(self, *_: object) -> None:
        _RUNNING.record = self._before


def recording(record: Record | None) -> AbstractContextManager[None]:
    """Within, ``record`` takes this thread's latest decision for each operation; not in compiled
    code.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _Recording(record)


def current_record() -> Record | None:
    """The record of the `recording` that this thread is in: backward passes go on with it."""
    return None if torch.compiler.is_compiling() else _RUNNING.record


def compute(
    operation: str,
    candidates: Mapping[str, Callable[[], Result]],
    tensors: tuple[Tensor, ...],
    options: tuple[Any, ...] = (),
    *,
    tunable: bool = True,
    exact: str | None = None,
) -> Result:
    """Compute ``operation`` with the backend that is forced, or with the fastest verified one.

    Args:
        candidates: backend -> function that computes it; the default comes first.
        tensors, options: what the time depends on, see `autotune.LayerKey`.
        tunable: False where running a candidate has an effect (it draws random numbers): then the
            default is used unless another backend is forced. So it is inside torch.compile.
        exact: the candidate that prunes nothing, where there is one: it is used where it is as
            fast. Where nothing is measured, the first of the others is the default.

    Raises:
        RuntimeError: the forced backend is not among the candidates or cannot run here.
    """
    default = next(name for name in candidates if name != exact)
    if torch.compiler.is_compiling():
        return candidates[_without_measuring(operation, default, tuple(candidates))]()
    if tunable:
        key = autotune.LayerKey.of(*tensors, options=options)
        question = autotune.Question(operation, key, candidates, tensors[0].device, exact)
        decision = autotune.choose(question)
    else:
        name = _without_measuring(operation, default, tuple(candidates))
        forced = registry.demanded(operation, candidates) is not None
        reason = "forced" if forced else "not measured: it draws random numbers"
        decision = autotune.Decision(operation, "", name, reason, {})
    if _RUNNING.record is not None:
        _RUNNING.record[operation] = decision
    return candidates[decision.backend]()


def demanded(operation: str, names: tuple[str, ...]) -> str | None:
    """The one of ``names`` that `registry.force`, FST_BACKENDS or `registry.prefer` names."""
    name = registry.named(operation)
    return name if name in names else None


demanded._dynamo_marked_constant = True


def note(operation: str, backend: str, reason: str) -> None:
    """Record that ``backend`` computes ``operation`` where there is nothing to choose."""
    if not torch.compiler.is_compiling() and _RUNNING.record is not None:
        _RUNNING.record[operation] = autotune.Decision(operation, "", backend, reason, {})


def _without_measuring(operation: str, default: str, names: tuple[str, ...]) -> str:
    return registry.demanded(operation, names) or default


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
_without_measuring._dynamo_marked_constant = True


def seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for kernels: one int64 on ``device``, drawn without a host synchronisation."""
    source = device if generator is None else generator.device
    drawn = torch.randint(2**62, (1,), generator=generator, device=source)
    return drawn.to(device, non_blocking=True)
