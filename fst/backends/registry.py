"""The backends there are, whether they can run here, and which ones are forced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from fst.basics.errors import UsageError
from fst.basics.text import suggest, table

VARIABLE = "FST_BACKENDS"
OPERATIONS: dict[str, str] = {}  # name -> what it computes


class Backend:
    """One implementation of one or several operations.

    A subclass has a method for each of its operations, of the operation's name: it takes the
    operands and returns the result.

    Attributes:
        name: unique within an operation.
        computes: operation -> the way it is computed, in words.
        is_timed: True where its gain depends on shares of zeros: then times decide on CPUs too.
    """

    name: ClassVar[str]
    computes: ClassVar[Mapping[str, str]]
    is_timed: ClassVar[bool] = False

    def missing(self) -> str:
        """The reason why the backend cannot run in this process; "" if it can."""
        return ""

    def applies(self, operands: Any) -> bool:
        """False where the question is not the backend's: it is not listed, and not forced."""
        return True

    def refuses(self, operands: Any) -> str:
        """The reason why the backend cannot compute these operands; "" if it can."""
        return ""

    def useless(self, operands: Any) -> str:
        """The reason why the backend would gain nothing here; forced, it computes all the same."""
        return ""

    def expected(self, operands: Any) -> float:
        """Speed relative to the dense backend, on which the choice rests where nothing is timed."""
        return 1.0

    def work(self, operands: Any) -> float:
        """Return the share of the work that zeros leave, in (0, 1]; time is about proportional."""
        return 1.0

    def left_out(self, operands: Any) -> str:
        """The multiply-adds that are not done, in words; "" where all are."""
        return ""

    def run(self, operands: Any) -> Any:
        """The operation's result."""
        return getattr(self, operands.operation)(operands)

    def prepare(self, operands: Any) -> Callable[[Any], Any] | None:
        """Return `run` as a function of the first operand alone, for others of its form, which is
        not checked again; None where there is nothing to save.
        """
        return None

    def reason_against(self, operands: Any) -> str:
        """`missing` or `refuses`, whichever says something."""
        return self.missing() or self.refuses(operands)


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
    found = known(operation, name)
    if found is None:
        names = [b.name for b in backends(operation)]
        raise ValueError(f"{operation}={name!r} is no backend of it.{suggest(name, names)}")
    return found


def known(operation: str, name: str) -> Backend | None:
    """`backend`, or None where there is none of that name."""
    return _BACKENDS.get((operation, name))


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
    forced = _FORCED.get(operation, names.get(operation, ""))
    return forced or _PREFERRED.get(operation, ""), bool(forced)


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
demanded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def demands() -> tuple[object, ...]:
    """Return the backends that `force` and `prefer` ask for now."""
    return (*_FORCED.items(), *_PREFERRED.items()) if _FORCED or _PREFERRED else ()


def candidates(operands: Any) -> tuple[list[Backend], str]:
    """The backends that may compute these operands, and the reasons against the others, in words.

    The demanded backend alone, else those that can compute them and may gain.

    Raises:
        RuntimeError: the forced backend refuses the operands; the message has every backend's
            reason.
    """
    operation = operands.operation
    name, forced = demanded(operation)
    if name and (chosen := _BACKENDS[operation, name]).applies(operands):
        if not chosen.reason_against(operands):
            return [chosen], "forced"
        if forced:
            raise UsageError(_refusals(operation, name, operands))
    found, reasons = [], []
    for candidate in _names(operation):
        backend = _BACKENDS[operation, candidate]
        if backend.applies(operands):
            reason = backend.missing() or backend.useless(operands) or backend.refuses(operands)
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
    others = [b for b in backends(operation) if b.applies(operands)]
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
        raise ValueError(f"operation={operation!r} is unknown.{suggest(operation, OPERATIONS)}")


def _check_usable(operation: str, name: str) -> None:
    reason = backend(operation, name).missing()
    if reason:
        raise UsageError(f"{operation}={name!r} cannot be forced here: {reason}")


def describe() -> str:
    """Table of all backends, and whether they can run here."""
    rows = [
        (operation, b.name, b.missing() or "available", b.computes[operation])
        for (operation, _), b in sorted(_BACKENDS.items())
    ]
    return table(("operation", "backend", "here", "computes"), rows)
