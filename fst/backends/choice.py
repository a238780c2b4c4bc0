"""The choice of a backend: by measured times where there are any, with its reason.

forced or preferred  →  that backend
one candidate        →  that backend
times may be taken   →  the fastest, by a margin; the times are kept in the layer and on disk
else                 →  the candidate that is predicted to be the fastest
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fst.backends import registry, store, timing
from fst.backends.record import MOST_SIZES, Decision, Record, Times
from fst.backends.registry import Backend

DENSE = "dense"  # the backend that skips nothing
LEAST_GAIN = 1.05
LEAST_SAVED = 0.5  # ms in training, against the dense backend: a call of the op costs as much
REPEATS = 11
LONG = 8.0  # milliseconds of one candidate's calls, after which fewer repeats are enough
LONG_PACKED = 200.0  # of a packed layer, which chooses once for all its calls
TIMED_SAMPLES = 8  # of a batch: a vector of images; AVX-512 has twice as many
CAPTURED = "not measured: a graph is captured"
VARIABLE = "FST_AUTOTUNE"


Key = tuple[tuple[Any, ...], tuple[Any, ...]]


def key_of(*tensors: Tensor, options: tuple[Any, ...] = ()) -> Key:
    """The `Operands.key` of these tensors: shape, strides and dtype of each, and ``options``.

    Args:
        options: whatever else counts, as plain numbers, strings, dtypes and tuples of them.
    """
    return tuple([(t.shape, t.stride(), t.dtype) for t in tensors]), options


@dataclass(slots=True)
class Operands:
    """Base class: the operands of one operation.

    Attributes:
        operation: its name in `fst.backends.OPERATIONS`.
        kind: the name of the methods of the backends that compute it.
        trains: False of packed layers, where every gain counts and rounding may vary.
    """

    operation: ClassVar[str]
    kind: ClassVar[str]
    trains: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        """Of the tensors."""
        raise TypeError(f"{type(self).__name__} has no tensors.")

    @property
    def draws(self) -> bool:
        """True where a run draws random numbers: then it is never timed."""
        return False

    @property
    def is_all_zero(self) -> bool:
        """True where a counted operand is wholly zero: such times say nothing about other ones."""
        return False

    def key(self) -> Key:
        """All that the time of a run depends on, except for the machine and zeros: see `key_of`."""
        raise TypeError(f"{type(self).__name__} has no key.")

    def without_draws(self) -> Any:
        """The same operands without the lists that an earlier run has drawn: each timed run does
        the whole work.
        """
        return self

    def first_samples(self, count: int) -> tuple[Any, float]:
        """The operands of the first samples, where times may be measured on some of them, and how
        many times as much the whole is.
        """
        return self, 1.0


def choose(
    operands: Operands, record: Record | None = None, only: tuple[str, ...] = ()
) -> tuple[Callable[[Any], Any], Decision]:
    """The function that computes operands of this form, and the decision, which is recorded.

    Args:
        record: by whose times it chooses; None: by a new one's.
        only: names of the backends to choose from, where one of them can compute it.

    Raises:
        RuntimeError: the forced backend refuses the operands.
    """
    found, reasons = registry.candidates(operands)
    allowed = [backend for backend in found if backend.name in only]
    if allowed and len(found) > 1:
        found, reasons = allowed, "no other backend is allowed here"
    if torch.compiler.is_compiling():
        backend = _cheapest(found, operands)
        return backend.plan(operands), Decision(operands.operation, backend.name, "")
    record = Record() if record is None else record
    by_name = {backend.name: backend for backend in found}
    decision = _decide(operands, by_name, reasons, record)
    backend = by_name[decision.backend]
    decision = decision._replace(skipped=backend.skipped(operands))
    record.decisions[operands.operation] = decision
    return backend.plan(operands), decision


def compute(operands: Operands, record: Record | None = None) -> Any:
    """The operation's result, by the backend that `choose` takes."""
    return choose(operands, record)[0](operands)


def _cheapest(found: list[Backend], operands: Operands) -> Backend:
    """The candidate that is predicted to be the fastest, the first of equal ones."""
    best, least = found[0], math.inf
    for backend in found:
        cost = backend.cost(operands)
        if cost < least:
            best, least = backend, cost
    return best


def may_time(device: torch.device, found: dict[str, Backend], operands: Operands) -> bool:
    """True where candidates are timed: FST_AUTOTUNE=1 or 0; unset, on GPUs, of packed layers, and
    on CPUs where one of them skips what another one computes.

    Other backends of one result are not timed on CPUs: rounding would follow the times, for little.
    """
    if is_off():
        return False
    if os.environ.get(VARIABLE) == "1" or device.type == "cuda" or not operands.trains:
        return True
    return len({backend.skipped(operands) for backend in found.values()}) > 1


def is_off() -> bool:
    """True where nothing is timed: FST_AUTOTUNE=0, or deterministic algorithms are wanted."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 0 or 1.")
    return value == "0" or torch.are_deterministic_algorithms_enabled()


def _decide(
    operands: Operands, found: dict[str, Backend], reasons: str, record: Record
) -> Decision:
    operation = operands.operation
    if len(found) == 1:
        (name,) = found
        return Decision(operation, name, reasons)
    predicted = _cheapest([*found.values()], operands).name
    if operands.draws:
        return Decision(operation, predicted, "not measured: it draws random numbers")
    if not may_time(operands.device, found, operands):
        return Decision(operation, predicted, "not measured: by shapes and zeros")
    if operands.is_all_zero:
        return Decision(operation, predicted, "not measured: all is zero")
    default = DENSE if DENSE in found else predicted
    costs = {name: backend.cost(operands) for name, backend in found.items()}
    key = json.dumps([operation, *operands.key()], default=str)
    times = record.times.get(key, {})
    if not found.keys() <= times.keys():
        if usual := _usual(record, operands, costs, default):
            return Decision(operation, usual, "as for most other sizes of this layer")
        surroundings = store.environment(operands.device)
        times = store.known(surroundings, key)
        if not found.keys() <= times.keys():
            if operands.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return Decision(operation, default, CAPTURED)
            measured = _measured(operands, found, default)
            times = {name: time / costs[name] for name, time in measured.items()}
            store.add(surroundings, key, times)
        record.keep(key, times, operands.device)
    at_hand = {name: times[name] * costs[name] for name in found}
    return Decision(operation, *_fastest(at_hand, operands, default), at_hand)


def _usual(record: Record, operands: Operands, costs: dict[str, float], default: str) -> str:
    """The most frequent choice of a layer that has met many sizes, else "".

    Images of ever new sizes, as detectors have, must not be measured for ever.
    """
    start = f'["{operands.operation}"'
    known = [
        {name: times[name] * costs[name] for name in costs}
        for key, times in record.times.items()
        if key.startswith(start) and costs.keys() <= times.keys()
    ]
    if len(known) < MOST_SIZES:
        return ""
    return Counter(_fastest(times, operands, default)[0] for times in known).most_common(1)[0][0]


def _measured(operands: Operands, found: dict[str, Backend], default: str) -> Times:
    """Times of all candidates, measured on some samples; infinite where one raised."""
    timing.PROGRESS.info("timing %s: %s", operands.operation, ", ".join(found))
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    some, scale = operands.first_samples(2 * TIMED_SAMPLES if wide else TIMED_SAMPLES)
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, Exception] = {}
    most, negligible = LONG_PACKED, 0.0
    if operands.trains:
        most, negligible = LONG, LEAST_SAVED / scale if default == DENSE else 0.0
    with torch.no_grad():
        for name, backend in found.items():
            try:
                plan = backend.plan(some)
                runs[name] = functools.partial(lambda plan: plan(some.without_draws()), plan)
            except Exception as error:  # as in a race
                errors[name] = error
        # Between two calls of a packed layer all other layers run, whose weights fill the caches.
        cold = not operands.trains
        least, raised = timing.race(runs, REPEATS, operands.device, most, negligible, cold)
    errors |= raised
    if default in errors:
        raise errors[default]
    return {name: time * scale for name, time in least.items()} | dict.fromkeys(errors, math.inf)


def _fastest(times: Times, operands: Operands, default: str) -> tuple[str, str]:
    """The backend to choose by these times, and the reason.

    One other than the default is chosen if it is at least 5 % faster, and in training against the
    dense backend if it saves what a call of the op costs.
    """
    best = min(times, key=times.__getitem__)
    gain = times[default] / times[best]
    failed = "".join(f"; {name} raised an error" for name, t in times.items() if t == math.inf)
    if best == default:
        return best, f"measured: the default is the fastest{failed}"
    if gain < LEAST_GAIN:
        return default, f"measured: {best} gains {gain - 1:.1%}, less than {LEAST_GAIN - 1:.0%}"
    if operands.trains and default == DENSE and times[default] - times[best] < LEAST_SAVED:
        return default, f"measured: {best} saves less than the {LEAST_SAVED} ms of its call"
    return best, f"measured: {gain:.2f}x the speed of {default}{failed}"


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for kernels: one int64 on ``device``, drawn without a host synchronisation."""
    source = device if generator is None else generator.device
    drawn = torch.randint(2**62, (1,), generator=generator, device=source)
    return drawn.to(device, non_blocking=True)
