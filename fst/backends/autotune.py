"""Chooses a backend for a layer by measuring once, at first use, and remembers it on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fst.backends import cache, registry

LEAST_GAIN = 1.05
REPEATS = 11
VARIABLE = "FST_AUTOTUNE"


class Decision(NamedTuple):
    """Which backend computes an operation for one key, and why.

    Attributes:
        times: backend -> median milliseconds; empty where nothing was measured.
    """

    operation: str
    key: str
    backend: str
    reason: str
    times: dict[str, float]


_DECIDED: dict[tuple[str, str, str], Decision] = {}
_FROM_DISK: dict[str, dict[str, Any]] = {}


def enabled(device: torch.device) -> bool:
    """Whether unknown keys are measured: FST_AUTOTUNE=1 or 0; unset, on GPUs only.

    On a CPU the choice changes rounding, so a rule of thumb that never varies is the default.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 0 or 1.")
    return value == "1" if value else device.type == "cuda"


def choose(
    operation: str,
    key: Mapping[str, Any],
    candidates: Mapping[str, Callable[[], object]],
    default: str,
    device: torch.device,
) -> Decision:
    """Decide which candidate computes ``operation`` for the layer that ``key`` describes.

    A forced backend wins. Else verified candidates are timed in turns, in both orders, and one
    other than ``default`` is chosen if its median is at least 5 % faster. Nothing is measured
    while a CUDA graph is captured, or where `enabled` is False.

    Args:
        key: JSON-serialisable description of the layer: shape, dtype, strides, ...
        candidates: backend -> function that runs it once on operands like the layer's.
        default: the candidate that is used where nothing is known.

    Raises:
        ValueError: unknown operation or backend, or ``default`` is not among the candidates.
        RuntimeError: the forced backend cannot run here or not for this key.
    """
    if default not in candidates:
        raise ValueError(f"default={default!r} is not among the candidates {sorted(candidates)}.")
    text = json.dumps(key, sort_keys=True)
    demanded = registry.forced(operation)
    if demanded is not None:
        if demanded not in candidates:
            raise RuntimeError(f"{operation}={demanded!r} is forced but cannot compute {text}.")
        return _remember(Decision(operation, text, demanded, "forced", {}), "forced")
    others = [
        name
        for name in candidates
        if name != default and registry.backend(operation, name).usable_by_default
    ]
    if not others:
        reason = "no other verified backend can run here"
        return _remember(Decision(operation, text, default, reason, {}), "alone")
    surroundings = cache.environment(device)
    where = json.dumps(surroundings)
    known = _DECIDED.get((operation, text, where)) or _from_disk(operation, text, surroundings)
    if known is not None and known.backend in (default, *others):
        return _remember(known, where)
    if _capturing(device) or not enabled(device):
        reason = "default: not measured"
        return Decision(operation, text, default, reason, {})
    decision = _measure(operation, text, {n: candidates[n] for n in (default, *others)}, device)
    cache.write(surroundings, {f"{operation} {text}": decision._asdict()})
    return _remember(decision, where)


def _remember(decision: Decision, where: str) -> Decision:
    _DECIDED[decision.operation, decision.key, where] = decision
    return decision


def _from_disk(operation: str, text: str, surroundings: dict[str, Any]) -> Decision | None:
    name = str(cache.path(surroundings))
    if name not in _FROM_DISK:
        _FROM_DISK[name] = cache.read(surroundings)
    entry = _FROM_DISK[name].get(f"{operation} {text}")
    if not isinstance(entry, dict) or set(entry) != set(Decision._fields):
        return None
    return Decision(**entry)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _measure(
    operation: str,
    text: str,
    functions: dict[str, Callable[[], object]],
    device: torch.device,
) -> Decision:
    from fst.benchmark import compare

    default = next(iter(functions))
    with torch.no_grad():
        timings = compare(functions, REPEATS, device)
    times = {name: timing.median for name, timing in timings.items()}
    best = min(times, key=times.__getitem__)
    gain = times[default] / times[best]
    if best == default:
        reason = "measured: the default is the fastest"
    elif gain < LEAST_GAIN:
        reason = f"measured: {best} gains {gain - 1:.1%}, less than {LEAST_GAIN - 1:.0%}"
        best = default
    else:
        reason = f"measured: {gain:.2f}x the speed of {default}"
    return Decision(operation, text, best, reason, times)


def decisions(operation: str | None = None) -> list[Decision]:
    """What was decided in this process, in order."""
    return [d for d in _DECIDED.values() if operation in (None, d.operation)]


def forget_decisions() -> None:
    """Forget what this process knows; the files on disk stay and are read anew."""
    _DECIDED.clear()
    _FROM_DISK.clear()
