"""Timing functions side by side: in turns, in both orders, medians with quartiles."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

PROGRESS = logging.getLogger("fst.progress")  # `fst bench` and `fst pack` show it
Function = Callable[[], object]
CACHE_BYTES = 256 * 2**20  # more than any GPU's L2
HOST_CACHE_BYTES = 64 * 2**20  # read before a cold call
LEAST_ROUNDS = 3
ENOUGH = 4.0  # milliseconds of a function's runs, before which nothing is sure
SILENCE = 2.0  # seconds
FLUSHES = 8  # about 0.5 ms on an H200: the host has queued a kernel before the GPU gets to it


class Timing(NamedTuple):
    """Milliseconds: median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        """The timing of at least one measured value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        digits = 1 if self.median >= 100 else 2 if self.median >= 1 else 4
        low, high = (f"{value:.{digits}f}" for value in (self.low, self.high))
        return f"{self.median:.{digits}f} ({low} to {high})"


class Samples(NamedTuple):
    """Milliseconds of every call: until its work is done, and until it returned to the host."""

    done: list[float]
    returned: list[float]


def sample(
    functions: Mapping[str, Function],
    repeats: int,
    device: torch.device,
    warmup: int = 3,
    most: float = math.inf,
) -> dict[str, Samples]:
    """Time all functions in turns, every other round in reverse order.

    There are fewer rounds than ``repeats``, but `LEAST_ROUNDS`, where those of the slowest function
    would take more than ``most`` milliseconds.

    On CUDA by events, with the L2 cache flushed before each call; such a call's host time is
    measured without a synchronisation.
    """
    taken = {name: Samples([], []) for name in functions}
    for function in functions.values():
        for _ in range(warmup):
            function()
    clock = _cuda_clock(device) if device.type == "cuda" else _host_clock
    order, begin = list(functions), time.perf_counter()
    said = begin
    for rounds in range(repeats):
        now = time.perf_counter()
        if rounds and now - said > SILENCE:
            left, said = (now - begin) / rounds * (repeats - rounds), now
            PROGRESS.info("timed %d of %d rounds, at most %.0f s left", rounds, repeats, left)
        if rounds >= LEAST_ROUNDS and max(sum(of.done) for of in taken.values()) > most:
            break
        for name in order:
            done, returned = clock(functions[name])
            taken[name].done.append(done)
            taken[name].returned.append(returned)
        order.reverse()
    return taken


def compare(
    functions: Mapping[str, Function],
    repeats: int,
    device: torch.device,
    warmup: int = 3,
    most: float = math.inf,
) -> dict[str, Timing]:
    """`sample`, summed up: the time until the work of each function is done."""
    taken = sample(functions, repeats, device, warmup, most)
    return {name: Timing.of(samples.done) for name, samples in taken.items()}


def race(
    functions: Mapping[str, Function],
    rounds: int,
    device: torch.device,
    most: float,
    negligible: float = 0.0,
    cold: bool = False,
) -> tuple[dict[str, float], dict[str, Exception]]:
    """Least milliseconds of each function, run in turns and in both orders; and what some raised.

    After n rounds, those that took 1 + 2/n times the least are out, if all have run for `ENOUGH`.
    The race ends when one is left, when one has run for ``most`` milliseconds, or when all take
    less than the ``negligible`` ones. ``cold`` functions find nothing in a CPU's caches.
    """
    host_clock = _cold_clock() if cold else _host_clock
    clock = _cuda_clock(device) if device.type == "cuda" else host_clock
    times: dict[str, float] = {}
    spent = dict.fromkeys(functions, 0.0)
    errors: dict[str, Exception] = {}
    running = list(functions)
    for done in range(rounds):
        if not running or done >= 2 and max(times.values()) < negligible:
            break
        if done and min(spent[name] for name in running) > ENOUGH:
            least = min(times.values())
            running = [name for name in running if times[name] < (1 + 2 / done) * least]
            if len(running) == 1 or max(spent[name] for name in running) > most:
                break
        for name in tuple(running):
            try:
                taken, _ = clock(functions[name])
            except Exception as error:  # a kernel that does not fit this GPU must end no training
                errors[name] = error
                running.remove(name)
                times.pop(name, None)
            else:
                times[name] = min(taken, times.get(name, math.inf))
                spent[name] += taken
        running.reverse()
    return times, errors


_host_time = time.perf_counter


@contextlib.contextmanager
def processor_time() -> Iterator[None]:
    """Measure by the processor time of this process, all threads together, while the block runs.

    For machines that others use too: waiting for a processor does not count.
    """
    global _host_time
    _host_time = time.process_time
    try:
        yield
    finally:
        _host_time = time.perf_counter


def _host_clock(function: Function) -> tuple[float, float]:
    begin = _host_time()
    function()
    milliseconds = (_host_time() - begin) * 1e3
    return milliseconds, milliseconds


def _cold_clock() -> Callable[[Function], tuple[float, float]]:
    others = torch.zeros(HOST_CACHE_BYTES // 4)

    def clock(function: Function) -> tuple[float, float]:
        others.sum()
        return _host_clock(function)

    return clock


def _cuda_clock(device: torch.device) -> Callable[[Function], tuple[float, float]]:
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device)

    def clock(function: Function) -> tuple[float, float]:
        for _ in range(FLUSHES):
            cache.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):  # whose stream is recorded
            start.record()
            _, returned = _host_clock(function)
            end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end), returned

    return clock


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
