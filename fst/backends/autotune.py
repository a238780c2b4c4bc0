"""Chooses a backend for a layer by measuring once, at first use, and remembers it on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import cache, registry, timing

LEAST_GAIN = 1.05
LEAST_SAVED = 0.5  # ms beside an exact candidate: a call of the op costs more than the library's
REPEATS = 11
LONG = 250.0  # milliseconds of one candidate's calls, after which fewer repeats are enough
MOST_DECIDED = 8192
VARIABLE = "FST_AUTOTUNE"
Candidates = Mapping[str, Callable[[], object]]


class LayerKey(NamedTuple):
    """What the time of a layer's operation depends on, besides the machine.

    Attributes:
        tensors: shape, strides and dtype of each operand.
        options: whatever else counts, as plain numbers, strings and tuples of them.
    """

    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    options: tuple[Any, ...] = ()

    @classmethod
    def of(cls, *tensors: Tensor, options: tuple[Any, ...] = ()) -> LayerKey:
        """The key of an operation on these operands."""
        described = ((tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors)
        return cls(tuple(described), options)


class Question(NamedTuple):
    """Which of some backends shall compute an operation for a layer.

    Attributes:
        candidates: backend -> function that runs it once on operands like the layer's; the first
            other than ``exact`` is the default, which is used where nothing is known.
        exact: the candidate that prunes nothing, where there is one. It is used unless another one
            is faster, by `LEAST_SAVED` at least: so times are measured on CPUs too, unless
            FST_AUTOTUNE=0 says otherwise.
    """

    operation: str
    key: LayerKey
    candidates: Candidates
    device: torch.device
    exact: str | None = None

    @property
    def default(self) -> str:
        """The candidate that computes where nothing is measured."""
        return next(name for name in self.candidates if name != self.exact)


class Decision(NamedTuple):
    """Which backend computes an operation for one key, and why.

    Attributes:
        key: the layer's key as JSON.
        times: backend -> median milliseconds, infinite where it raised; empty where nothing was
            measured.
    """

    operation: str
    key: str
    backend: str
    reason: str
    times: dict[str, float]


_DECIDED: dict[tuple[Any, ...], Decision] = {}
_FROM_DISK: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}


def enabled(device: torch.device) -> bool:
    """Whether backends of one result are timed: FST_AUTOTUNE=1 or 0; unset, on GPUs only.

    On a CPU the choice changes rounding, so a rule of thumb that never varies is the default.
    Against an exact candidate times are measured on CPUs too, see `choose`.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 0 or 1.")
    return value == "1" if value else device.type == "cuda"


def choose(question: Question) -> Decision:
    """Decide which candidate computes the operation for the layer that the key describes.

    A forced backend wins. Else verified candidates are timed in turns, in both orders, and one
    other than the default is chosen if its median is at least 5 % faster; one that raises is left
    out, and the reason says with what. Nothing is measured while a CUDA graph is captured, or where
    `enabled` is False.

    Raises:
        ValueError: unknown operation or backend.
        RuntimeError: the forced backend cannot run here, or not for this key.
    """
    operation, key, candidates, device, exact = question
    demanded = registry.demanded(operation, candidates)
    tuning = enabled(device) if exact is None else os.environ.get(VARIABLE) != "0"
    default = exact if exact is not None and tuning else question.default
    settings = tuple(cache.settings(device).values())
    quick = (operation, key, tuple(candidates), default, device, settings, demanded, tuning)
    known = _DECIDED.get(quick)
    if known is not None:
        return known
    text = json.dumps(key._asdict())
    others = [
        name
        for name in candidates
        if name != default and registry.backend(operation, name).usable_by_default
    ]
    if demanded is not None:
        decision = Decision(operation, text, demanded, "forced", {})
    elif not others:
        reason = "no other verified backend can run here"
        decision = Decision(operation, text, default, reason, {})
    elif not tuning:
        decision = Decision(operation, text, default, f"not measured ({VARIABLE} is off)", {})
    else:
        compared = {name: candidates[name] for name in (default, *others)}
        least = 0.0 if exact is None else LEAST_SAVED
        found = _recalled_or_measured(operation, text, compared, device, least)
        if found is None:
            return Decision(operation, text, default, "not measured: a graph is captured", {})
        decision = found
    if len(_DECIDED) >= MOST_DECIDED:
        forget_decisions()  # what was measured is on the disk
    _DECIDED[quick] = decision
    return decision


def _recalled_or_measured(
    operation: str,
    text: str,
    candidates: dict[str, Callable[[], object]],
    device: torch.device,
    least_saved: float,
) -> Decision | None:
    surroundings = cache.environment(device)
    known = _recalled(operation, text, surroundings)
    if known is not None and set(known.times) == set(candidates):
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    decision = _measured(operation, text, candidates, device, least_saved)
    cache.add(surroundings, decision._asdict())
    return decision


def _recalled(operation: str, text: str, surroundings: dict[str, Any]) -> Decision | None:
    file = str(cache.path(surroundings))
    if file not in _FROM_DISK:
        _FROM_DISK[file] = cache.read(surroundings)
    entry = _FROM_DISK[file].get((operation, text))
    return None if entry is None else Decision(**entry)


def _measured(
    operation: str,
    text: str,
    candidates: dict[str, Callable[[], object]],
    device: torch.device,
    least_saved: float,
) -> Decision:
    default, *others = candidates
    with torch.no_grad():
        errors = {name: error for name in others if (error := _error_of(candidates[name]))}
        running = {name: run for name, run in candidates.items() if name not in errors}
        timings = timing.compare(running, REPEATS, device, warmup=1, most=LONG)
    times = {name: measured.median for name, measured in timings.items()}
    best = min(times, key=times.__getitem__)
    gain = times[default] / times[best]
    if best == default:
        reason = "measured: the default is the fastest"
    elif gain < LEAST_GAIN:
        reason = f"measured: {best} gains {gain - 1:.1%}, less than {LEAST_GAIN - 1:.0%}"
        best = default
    elif times[default] - times[best] < least_saved:
        reason = f"measured: {best} saves less than the {least_saved} ms of its call"
        best = default
    else:
        reason = f"measured: {gain:.2f}x the speed of {default}"
    for name, error in errors.items():
        times[name] = math.inf
        reason += f"; {name} raised {error}"
    return Decision(operation, text, best, reason, times)


def _error_of(candidate: Callable[[], object]) -> str:
    """What it raises, or "": a kernel that does not fit this GPU must not end a training."""
    try:
        candidate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def decisions(operation: str | None = None) -> list[Decision]:
    """What was decided in this process, in order: the latest, at most `MOST_DECIDED`."""
    return [d for d in _DECIDED.values() if operation in (None, d.operation)]


def forget_decisions() -> None:
    """Forget what this process knows; the files on disk stay and are read anew."""
    _DECIDED.clear()
    _FROM_DISK.clear()
