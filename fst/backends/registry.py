"""The backends there are, whether they can run here, and which ones are forced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fst.basics.errors import UsageError
from fst.basics.text import suggest, table

VARIABLE = "FST_BACKENDS"
OPERATIONS: dict[str, str] = {}  # name -> what it computes
GONE = {
    "mma_sp": " The 2:4 tensor-core kernels were removed: docs/kernels.md names the last commit "
    "that has them."
}


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        operation: one of `OPERATIONS`.
        name: unique within the operation; "torch" is the default everywhere.
        computes: how, in words.
        verified: whether it has been compared with the reference on the device it is made for.
        missing: why it cannot run here, "" if it can.
    """

    operation: str
    name: str
    computes: str
    verified: bool
    missing: Callable[[], str]

    @property
    def usable_by_default(self) -> bool:
        """Whether the autotuner may choose it without being asked."""
        return self.verified and not self.missing()


_BACKENDS: dict[tuple[str, str], Backend] = {}
_FORCED: dict[str, str] = {}
_PREFERRED: dict[str, str] = {}


def register_operation(name: str, computes: str) -> None:
    """Add an operation that backends may compute."""
    OPERATIONS[name] = computes


def register_backend(backend: Backend) -> Backend:
    """Add a backend.

    Raises:
        ValueError: unknown operation, or the name is taken.
    """
    _check_operation(backend.operation)
    key = (backend.operation, backend.name)
    if key in _BACKENDS:
        raise ValueError(f"name={backend.name!r} is taken in operation {backend.operation!r}.")
    _BACKENDS[key] = backend
    return backend


def backends(operation: str | None = None) -> tuple[Backend, ...]:
    """All backends, or those of one operation."""
    if operation is not None:
        _check_operation(operation)
    return tuple(b for b in _BACKENDS.values() if operation in (None, b.operation))


def backend(operation: str, name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: unknown operation or name.
    """
    _check_operation(operation)
    found = _BACKENDS.get((operation, name))
    if found is None:
        reason = GONE.get(name) or suggest(name, [b.name for b in backends(operation)])
        raise ValueError(f"{operation}={name!r} is no backend of it.{reason}")
    return found


@contextlib.contextmanager
def force(**names: str) -> Iterator[None]:
    """Use these backends whatever is faster, unverified ones included, inside a ``with`` block.

    The environment variable FST_BACKENDS does the same for a process.

    Example:
        ``with fst.backends.force(prune_grad_output="triton"): loss.backward()``

    Raises:
        ValueError: unknown operation or name.
        RuntimeError: the backend cannot run here; the message says why.
    """
    with _naming(_FORCED, names):
        yield


@contextlib.contextmanager
def prefer(**names: str) -> Iterator[None]:
    """`force` where the backends can compute the operands at hand; elsewhere the usual choice."""
    with _naming(_PREFERRED, names):
        yield


@contextlib.contextmanager
def _naming(named: dict[str, str], names: dict[str, str]) -> Iterator[None]:
    for operation, name in names.items():
        _check_usable(operation, name)
    before = dict(named)
    named.update(names)
    try:
        yield
    finally:
        named.clear()
        named.update(before)


def demanded(operation: str, candidates: Collection[str]) -> str | None:
    """The candidate that `force`, FST_BACKENDS or `prefer` names, or None.

    Raises:
        RuntimeError: the forced backend is not among the candidates.
    """
    name = named(operation)
    if name in candidates:
        return name
    if forced(operation):
        raise UsageError(
            f"{operation}={name!r} is forced but cannot compute this; "
            f"possible: {', '.join(candidates)}."
        )
    return None


def named(operation: str) -> str | None:
    """Name of the backend that `force`, FST_BACKENDS or `prefer` demands, or None."""
    return forced(operation) or _PREFERRED.get(operation)


def forced(operation: str) -> str | None:
    """Name of the backend that `force` or FST_BACKENDS demands, or None.

    Raises:
        ValueError, RuntimeError: FST_BACKENDS names an unknown backend, or one that cannot run
            here, for whatever operation.
    """
    _check_operation(operation)
    names: dict[str, str] = {}
    text = os.environ.get(VARIABLE)
    if text:
        names = parse(text, VARIABLE)
        for of, name in names.items():
            _check_usable(of, name)
    return _FORCED.get(operation, names.get(operation))


def demands() -> tuple[object, ...]:
    """What `force` and `prefer` demand now, for all operations."""
    return *_FORCED.items(), *_PREFERRED.items()


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
        raise ValueError(f"operation={operation!r} is unknown.{suggest(operation, OPERATIONS)}")


def _check_usable(operation: str, name: str) -> None:
    reason = backend(operation, name).missing()
    if reason:
        raise UsageError(f"{operation}={name!r} cannot be forced here: {reason}")


def describe() -> str:
    """Table of all backends: state, and whether they can run here."""
    states = {True: "verified", False: "unverified"}
    rows = [
        (b.operation, b.name, states[b.verified], b.missing() or "available", b.computes)
        for b in backends()
    ]
    return table(("operation", "backend", "state", "here", "computes"), rows)
