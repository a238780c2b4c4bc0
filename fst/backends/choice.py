"""The choice of a backend: measured once for a layer's shapes, recorded with its reason and times.

forced or preferred  →  that backend
one candidate        →  that backend
times may be taken   →  the fastest, by a margin; remembered in the layer and on disk
else                 →  the candidate that is expected to be the fastest
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fst.backends import cache, registry, timing
from fst.backends.record import Decision, Record
from fst.backends.registry import Backend
from fst.basics.machine import is_overloaded

DENSE = "dense"  # the backend that leaves nothing out
LEAST_GAIN = 1.05
LEAST_SAVED = 0.5  # ms beside the dense backend: a call of the op costs more than the library's
REPEATS = 11
LONG = 8.0  # milliseconds of one candidate's calls, after which fewer repeats are enough
TIMED_SAMPLES = 8  # of a batch: a vector of images; AVX-512 has twice as many
MOST_DECIDED = 8192
CAPTURED = "not measured: a graph is captured"
VARIABLE = "FST_AUTOTUNE"


class LayerKey(NamedTuple):
    """Key of a layer's operation: all that its time depends on, besides the machine.

    Attributes:
        tensors: shape, strides and dtype of each operand.
        options: whatever else counts, as plain numbers, strings, dtypes and tuples of them.
        zeros: the shares of zeros that count, which move in a training.
    """

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    options: tuple[Any, ...] = ()
    zeros: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, *tensors: Tensor, options: tuple[Any, ...] = (), zeros: tuple[float, ...] = ()
    ) -> LayerKey:
        """The key of an operation on these operands."""
        return cls(tuple([(t.shape, t.stride(), t.dtype) for t in tensors]), options, zeros)

    def text(self, operation: str) -> str:
        """The key of an operation as JSON."""
        return json.dumps([operation, *self], default=str)


class Operands(Protocol):
    """The operands of an operation."""

    def __iter__(self) -> Iterator[Any]:
        """Tensors and options."""

    @property
    def operation(self) -> str:
        """Name in `fst.backends.OPERATIONS`."""

    @property
    def device(self) -> torch.device:
        """Of the tensors."""

    @property
    def draws(self) -> bool:
        """True where a run draws random numbers: then it is never timed."""

    def key(self) -> LayerKey:
        """The key of these operands."""

    def fresh(self) -> Any:
        """The same operands, of which a timed run can take nothing that another one has left."""

    def part(self, count: int) -> tuple[Any, float]:
        """The operands of the first samples, where times may be measured on some of them, and how
        many times as much the whole is.
        """


class _Running(threading.local):
    """The record to which this thread writes its decisions, and whether its products are dense."""

    record: Record | None = None
    is_dense: bool = False


_RUNNING = _Running()
_DECIDED: dict[tuple[Any, ...], Decision] = {}
_FROM_DISK: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
_forgotten = 0  # how often decisions were forgotten


class _Recording:
    __slots__ = ("_before", "_inside")

    def __init__(self, record: Record | None, is_dense: bool) -> None:
        self._inside = record, is_dense

    def __enter__(self) -> None:
        self._before = _RUNNING.record, _RUNNING.is_dense
        _RUNNING.record, _RUNNING.is_dense = self._inside

    def __exit__(self, *_: object) -> None:
        _RUNNING.record, _RUNNING.is_dense = self._before


def recording(record: Record | None, *, is_dense: bool = False) -> AbstractContextManager[None]:
    """Inside the block, this thread's decisions are written to ``record``; not in compiled code.

    Args:
        is_dense: True for one of the record's ``dense_calls``: its products are those of the dense
            backend, and prunings are chosen as in the step before.
    """
    compiled = torch.compiler.is_compiling()
    return contextlib.nullcontext() if compiled else _Recording(record, is_dense)


def current_record() -> Record | None:
    """The record of the `recording` that this thread is in: backward passes go on with it."""
    return None if torch.compiler.is_compiling() else _RUNNING.record


def compute(operands: Operands) -> Any:
    """The operation's result, by the backend that `choose` returns."""
    return choose(operands).run(operands)


def choose(operands: Operands) -> Backend:
    """The backend that computes these operands; the decision is recorded.

    Raises:
        RuntimeError: the forced backend refuses the operands.
    """
    if torch.compiler.is_compiling():
        return _expected(registry.candidates(operands)[0], operands)
    record, operation, demands = _RUNNING.record, operands.operation, registry.demands()
    surroundings: tuple[object, ...] = ()
    if not _RUNNING.is_dense or demands:
        surroundings = demands, *_circumstances(operands.device)
    elif dense := registry.known(operation, DENSE):
        return dense
    if record is None:
        return _chosen(operands)[0]
    asked = (operation, operands.key(), operands.device, *map(type, operands), *surroundings)
    decision = record.answers.get(asked)
    if decision is None:
        backend, decision = _chosen(operands)
        decision = decision._replace(left_out=backend.left_out(operands))
        if decision.reason != CAPTURED:  # it is measured as soon as it can be
            record.answer(asked, decision)
    else:
        backend = registry.backend(operation, decision.backend)
    record.decisions[operation] = decision
    return backend


def _circumstances(device: torch.device) -> tuple[object, ...]:
    """All that a choice depends on besides the operands, demands and what was measured."""
    settings = cache.settings(device).values()
    texts = (os.environ.get(VARIABLE), os.environ.get(registry.VARIABLE))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return *texts, deterministic, _forgotten, *settings


def _chosen(operands: Operands) -> tuple[Backend, Decision]:
    found, reasons = registry.candidates(operands)
    by_name = {backend.name: backend for backend in found}
    decision = _decide(operands, by_name, reasons)
    return by_name[decision.backend], decision


def _expected(found: list[Backend], operands: Operands) -> Backend:
    """The candidate that is expected to be the fastest, the first of equal ones."""
    best, most = found[0], 0.0
    for backend in found:
        speed = backend.expected(operands)
        if speed > most:
            best, most = backend, speed
    return best


def timed(device: torch.device, found: dict[str, Backend]) -> bool:
    """True where candidates are timed: FST_AUTOTUNE=1 or 0; unset, on GPUs, and on CPUs where one
    of them leaves out what the dense backend computes.

    Other backends of one result are not timed on CPUs: rounding would follow the times, for little.
    """
    if is_off():
        return False
    if os.environ.get(VARIABLE) == "1" or device.type == "cuda" or DENSE in found:
        return True
    return any(backend.is_timed for backend in found.values())


def is_off() -> bool:
    """True where nothing is timed: FST_AUTOTUNE=0, or deterministic algorithms are wanted."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 0 or 1.")
    return value == "0" or torch.are_deterministic_algorithms_enabled()


def _decide(operands: Operands, found: dict[str, Backend], reasons: str) -> Decision:
    operation, device = operands.operation, operands.device
    if len(found) == 1:
        (name,) = found
        return Decision(operation, "", name, reasons, {})
    if operands.draws:
        name = _expected([*found.values()], operands).name
        return Decision(operation, "", name, "not measured: it draws random numbers", {})
    key, tuning = operands.key(), timed(device, found)
    if tuning and 1 in key.zeros:  # such times say nothing about other shares of zeros
        name = _expected([*found.values()], operands).name
        return Decision(operation, key.text(operation), name, "not measured: all is zero", {})
    settings = tuple(cache.settings(device).values())
    quick = (operation, key, tuple(found), device, settings, tuning)
    record = _RUNNING.record if tuning else None
    known = _DECIDED.get(quick)
    if known is not None and (record is None or record.has(known)):
        return known
    text = key.text(operation)
    decision = _chosen_before(record, operation, text, found)
    base = key._replace(zeros=()).text(operation)
    decision = decision or _by_earlier_times(record, operands, base, text, found) or known
    if decision is None and not tuning:
        name = _expected([*found.values()], operands).name
        decision = Decision(operation, text, name, "not measured: by shapes and zeros", {})
    elif decision is None:
        usual = "" if record is None else record.usual(operation)
        if usual in found:
            return Decision(operation, text, usual, "as for most other sizes of this layer", {})
        decision = _recalled_or_measured(operands, text, found)
        if decision is None:
            name = _default(operands, found)
            return Decision(operation, text, name, CAPTURED, {})
    if len(_DECIDED) >= MOST_DECIDED:
        forget_decisions()  # what was measured is on the disk
    _DECIDED[quick] = decision
    if record is not None:
        record.keep(decision, device)
        if base not in record.times or not found.keys() <= record.times[base].keys():
            work = {name: found[name].work(operands) for name in decision.times if name in found}
            record.times[base] = {name: decision.times[name] / work[name] for name in work}
    return decision


def _chosen_before(
    record: Record | None, operation: str, text: str, found: dict[str, Backend]
) -> Decision | None:
    """The decision in the layer's state, which a checkpoint may have brought; None without one."""
    entry = None if record is None else record.choices.get(text)
    if entry is None or entry["backend"] not in found:
        return None
    return Decision(operation, text, entry["backend"], entry["reason"], dict(entry["times"]))


def _by_earlier_times(
    record: Record | None, operands: Operands, base: str, text: str, found: dict[str, Backend]
) -> Decision | None:
    """The choice by what the layer has measured at another share of zeros; None without that.

    Nothing is timed again where a share moves, so that a resumed training chooses the same.
    """
    known = {} if record is None else record.times.get(base, {})
    if not found.keys() <= known.keys():
        return None
    times = {name: known[name] * backend.work(operands) for name, backend in found.items()}
    name, reason = _fastest(times, _default(operands, found))
    reason = reason.replace("measured", "measured at another share of zeros", 1)
    return Decision(operands.operation, text, name, reason, times)


def _default(operands: Operands, found: dict[str, Backend]) -> str:
    """The candidate that others must beat: the dense one where there is one."""
    return DENSE if DENSE in found else _expected([*found.values()], operands).name


def _recalled_or_measured(
    operands: Operands, text: str, found: dict[str, Backend]
) -> Decision | None:
    device, operation = operands.device, operands.operation
    surroundings = cache.environment(device)
    known = _recalled(operation, text, surroundings)
    if known is not None and set(known.times) == set(found):
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    decision = _measured(operands, text, found)
    if device.type == "cpu" and is_overloaded():
        return decision  # the next process measures again
    entry = decision._asdict()
    del entry["left_out"]
    cache.add(surroundings, entry)
    return decision


def _recalled(operation: str, text: str, surroundings: dict[str, Any]) -> Decision | None:
    file = str(cache.path(surroundings))
    if file not in _FROM_DISK:
        _FROM_DISK[file] = cache.read(surroundings)
    entry = _FROM_DISK[file].get((operation, text))
    return None if entry is None else Decision(**entry)


def _measured(operands: Operands, text: str, found: dict[str, Backend]) -> Decision:
    """Times of all candidates, measured on some samples, and the choice by them."""
    default = _default(operands, found)
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    some, scale = operands.part(2 * TIMED_SAMPLES if wide else TIMED_SAMPLES)
    runs = {name: _run_of(backend, some) for name, backend in found.items()}
    with torch.no_grad():
        negligible = LEAST_SAVED / scale if default == DENSE else 0.0
        least, errors = timing.race(runs, REPEATS, operands.device, LONG, negligible)
    if default in errors:
        raise errors[default]
    times = {name: time * scale for name, time in least.items()}
    best, reason = _fastest(times, default)
    for name, error in errors.items():
        times[name] = math.inf
        reason += f"; {name} raised {type(error).__name__}: {error}"
    return Decision(operands.operation, text, best, reason, times)


def _fastest(times: dict[str, float], default: str) -> tuple[str, str]:
    """The backend to choose by these times, and the reason.

    One other than the default is chosen if it is at least 5 % faster, and against the dense backend
    if it saves what a call of the op costs.
    """
    best = min(times, key=times.__getitem__)
    gain = times[default] / times[best]
    if best == default:
        reason = "measured: the default is the fastest"
    elif gain < LEAST_GAIN:
        reason = f"measured: {best} gains {gain - 1:.1%}, less than {LEAST_GAIN - 1:.0%}"
        best = default
    elif default == DENSE and times[default] - times[best] < LEAST_SAVED:
        reason = f"measured: {best} saves less than the {LEAST_SAVED} ms of its call"
        best = default
    else:
        reason = f"measured: {gain:.2f}x the speed of {default}"
    return best, reason


def _run_of(backend: Backend, operands: Operands) -> Callable[[], object]:
    return lambda: backend.run(operands.fresh())


def decisions(operation: str | None = None) -> list[Decision]:
    """The decisions of this process, in order: the latest, at most `MOST_DECIDED`."""
    return [d for d in _DECIDED.values() if operation in (None, d.operation)]


def forget_decisions() -> None:
    """Forget what this process knows; the files on disk stay and are read anew."""
    global _forgotten
    _DECIDED.clear()
    _FROM_DISK.clear()
    _forgotten += 1


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for kernels: one int64 on ``device``, drawn without a host synchronisation."""
    source = device if generator is None else generator.device
    drawn = torch.randint(2**62, (1,), generator=generator, device=source)
    return drawn.to(device, non_blocking=True)
