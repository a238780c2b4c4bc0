"""The backends there are, whether they can run here, and which ones are forced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from fst.basics.errors import UsageError
from fst.basics.text import suggest, table

VARIABLE = "FST_BACKENDS"
NO_GAIN = "no gain: "  # begins the reason of a backend that can compute, and would save nothing
OPERATIONS: dict[str, str] = {}  # name -> what it computes


class Backend:
    """One implementation of one or several operations.

    A subclass has a method for each kind of operands that it computes, of the kind's name (see
    `fst.ops.operands`). The method takes operands, and returns the function that computes operands
    of this form: `plan` calls it.

    Attributes:
        name: unique within an operation.
        computes: operation -> how it is computed, as text.
    """

    name: ClassVar[str]
    computes: ClassVar[Mapping[str, str]]

    def unavailable(self) -> str:
        """The reason why the backend cannot run in this process; "" if it can."""
        return ""

    def refuses(self, operands: Any) -> str:
        """The reason why it does not compute these operands; "" if it does.

        One that begins with `NO_GAIN` says that it can: forced, it computes all the same.
        """
        return ""

    def cost(self, operands: Any) -> float:
        """Predicted time relative to the dense backend's: the choice where nothing is timed.

        Times that were measured at other shares of zeros are scaled by it.
        """
        return 1.0

    def skipped(self, operands: Any) -> str:
        """Which multiply-adds are skipped, as text; "" where none are."""
        return ""

    def plan(self, operands: Any) -> Callable[[Any], Any]:
        """The function that computes operands of this form; it keeps none of their values."""
        return getattr(self, operands.kind)(operands)

    def computes_kind(self, operands: Any) -> bool:
        """False for operands of another kind: the backend is then neither listed nor forced."""
        return hasattr(self, operands.kind)

    def reason_against(self, operands: Any) -> str:
        """The reason why the backend cannot compute these operands; "" if it can."""
        reason = self.unavailable() or self.refuses(operands)
        return "" if reason.startswith(NO_GAIN) else reason


_BACKENDS: dict[tuple[str, str], Backend] = {}
# What `force` and `prefer` name now: operation, and a backend with True if it is forced.
demands: tuple[tuple[str, tuple[str, bool]], ...] = ()


def register_operation(name: str, computes: str) -> None:
    """Add an operation that backends may compute."""
    OPERATIONS[name] = computes


def register_backend(backend: Backend) -> Backend:
    """Add a backend.

    Raises:
        ValueError: unknown operation, or the name is taken.
    """
    for operation in backend.computes:
        _check_operation(operation)
        if (operation, backend.name) in _BACKENDS:
            raise ValueError(f"name={backend.name!r} is taken in operation {operation!r}.")
    for operation in backend.computes:
        _BACKENDS[operation, backend.name] = backend
    return backend


def backends(operation: str) -> tuple[Backend, ...]:
    """The backends of an operation."""
    _check_operation(operation)
    return tuple(found for (of, _), found in _BACKENDS.items() if of == operation)


def backend(operation: str, name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: unknown operation or name.
    """
    found = {b.name: b for b in backends(operation)}
    if name not in found:
        raise ValueError(f"{operation}={name!r} is no backend of it.{suggest(name, found)}")
    return found[name]


@contextlib.contextmanager
def force(**names: str) -> Iterator[None]:
    """Use these backends whatever is faster, inside a ``with`` block.

    The environment variable FST_BACKENDS does the same for a process.

    Example:
        ``with fst.backends.force(prune_grad_output="triton"): loss.backward()``

    Raises:
        ValueError: unknown operation or name.
        RuntimeError: the backend cannot run here; the message says why. A call whose operands the
            backend refuses raises it too, with the reason of every backend.
    """
    with _demanding(names, forced=True):
        yield


@contextlib.contextmanager
def prefer(**names: str) -> Iterator[None]:
    """`force` where the backends can compute the operands at hand; elsewhere the usual choice."""
    with _demanding(names, forced=False):
        yield


@contextlib.contextmanager
def _demanding(names: dict[str, str], *, forced: bool) -> Iterator[None]:
    global demands
    for operation, name in names.items():
        _check_usable(operation, name)
    before, now = demands, dict(demands)
    for operation, name in names.items():
        if forced or not now.get(operation, ("", False))[1]:
            now[operation] = name, forced
    demands = tuple(now.items())
    try:
        yield
    finally:
        demands = before


def demanded(operation: str) -> tuple[str, bool]:
    """The backend that `force`, FST_BACKENDS or `prefer` names, or "", and True if it is forced.

    Raises:
        ValueError, RuntimeError: FST_BACKENDS names an unknown backend, or one that cannot run
            here, for whatever operation.
    """
    names: dict[str, str] = {}
    text = os.environ.get(VARIABLE)
    if text:
        names = parse(text, VARIABLE)
        for of, name in names.items():
            _check_usable(of, name)
    name, forced = dict(demands).get(operation, ("", False))
    if not forced and operation in names:
        return names[operation], True
    return name, forced


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
demanded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def candidates(operands: Any) -> tuple[list[Backend], str]:
    """The backends that may compute these operands, and the reasons against the others.

    The demanded backend alone, else those that can compute them and may gain.

    Raises:
        RuntimeError: the forced backend refuses the operands; the message has every backend's
            reason.
    """
    operation = operands.operation
    name, forced = demanded(operation)
    if name and (chosen := _BACKENDS[operation, name]).computes_kind(operands):
        if not chosen.reason_against(operands):
            return [chosen], "forced"
        if forced:
            raise UsageError(_refusals(operation, name, operands))
    found, reasons = [], []
    for candidate in _names(operation):
        backend = _BACKENDS[operation, candidate]
        if backend.computes_kind(operands):
            reason = backend.unavailable() or backend.refuses(operands)
            if reason:
                reasons.append(f"{backend.name}: {reason}")
            else:
                found.append(backend)
    return found, "; ".join(reasons) or "no other backend can run here"


def _names(operation: str) -> tuple[str, ...]:
    """Names of an operation's backends; torch.compile takes the result as a constant."""
    return tuple(name for of, name in _BACKENDS if of == operation)


_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refusals(operation: str, name: str, operands: Any) -> str:
    others = [b for b in backends(operation) if b.computes_kind(operands)]
    reasons = ((b.name, b.reason_against(operands) or "can compute it") for b in others)
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    return f"{operation}={name!r} is forced but cannot compute this. {listed}."


def parse(text: str, source: str) -> dict[str, str]:
    """``"prune_weight=triton,grad_weight=strided"`` as a dictionary.

    Raises:
        ValueError: unknown operation, or not of that form; the message names ``source``.
    """
    names = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, name = part.partition("=")
        if not equals or operation not in OPERATIONS:
            raise ValueError(
                f"{source}={text!r}: {part!r} is not OPERATION=BACKEND."
                f"{suggest(operation, OPERATIONS)}"
            )
        names[operation] = name
    return names


def _check_operation(operation: str) -> None:
    if operation not in OPERATIONS:
        hint = suggest(operation, OPERATIONS) if OPERATIONS else " import fst.ops registers all."
        raise ValueError(f"operation={operation!r} is unknown.{hint}")


def _check_usable(operation: str, name: str) -> None:
    reason = backend(operation, name).unavailable()
    if reason:
        raise UsageError(f"{operation}={name!r} cannot be forced here: {reason}")


def describe() -> str:
    """Table of all backends, and whether they can run here."""
    rows = [
        (operation, b.name, b.unavailable() or "available", b.computes[operation])
        for (operation, _), b in sorted(_BACKENDS.items())
    ]
    return table(("operation", "backend", "here", "computes"), rows)
