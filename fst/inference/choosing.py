"""The fastest of several ways of computing a product: timed for some forms of its input."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fst.backends.timing import Timing, compare

MARGIN = 1.05  # what another way than the first must gain, as in training
REPEATS, MOST_MS = 5, 200.0  # of a way's timing
MOST_TIMED = 8  # forms of an input; further ones do as the nearest of these
MOST_PLANS = 8  # forms for which a product is ready
_CHOOSING = threading.RLock()

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, Any]
Plan = Callable[[Tensor, Tensor | None], Tensor]  # of an input and what is added to its product
Ways = Mapping[str, Callable[[], Plan]]  # what prepares a plan, by name; the default comes first


def fastest(times: Mapping[str, Timing]) -> tuple[str, str]:
    """The way to take, and why: the first one, unless another gains `MARGIN`."""
    default = next(iter(times))
    best = min(times, key=lambda name: times[name].median)
    gain = times[default].median / times[best].median
    if best == default:
        return default, "the fastest"
    if gain < MARGIN:
        return default, f"{best} gains {gain - 1:.1%}, less than {MARGIN - 1:.0%}"
    return best, f"{gain:.2f}x the speed of {default}"


class Choice:
    """Which way computes a product, for each form of its input.

    Attributes:
        layers: names of those that the product computes.
        times: of each form that was timed, of each way.
        allowed: the only ways that may be taken, in this order; empty for all.
        first: the way that was taken first.
    """

    def __init__(self, *layers: str) -> None:
        self.layers = layers
        self.times: dict[Form, dict[str, Timing]] = {}
        self.allowed: tuple[str, ...] = ()
        self.first = ""
        self._ready: tuple[Any, dict[Form, Plan]] = (None, {})

    def plan(
        self,
        made_of: Any,
        input: Tensor,
        residual: Tensor | None,
        ways: Callable[[Tensor, Tensor | None], Ways],
    ) -> Plan:
        """The plan for operands of this form; it is prepared anew where ``made_of`` has changed."""
        known, plans = self._ready
        if known != made_of:
            plans = {}
            self._ready = made_of, plans  # at once, as other threads read it
        added = None if residual is None else (residual.shape, residual.stride(), residual.dtype)
        form = (input.shape, input.stride(), input.dtype, added)
        plan = plans.get(form)
        if plan is None:
            with _CHOOSING, torch.inference_mode(False), torch.no_grad():
                plan = self._prepare(form, input, residual, ways(input, residual))
                while len(plans) >= MOST_PLANS:
                    plans.pop(next(iter(plans)))
                plans[form] = plan
        return plan

    def only(self, *ways: str) -> None:
        """Take no other ways from now on."""
        self.allowed, self.first, self._ready = ways, "", (None, {})

    def _prepare(self, form: Form, input: Tensor, residual: Tensor | None, ways: Ways) -> Plan:
        names = [name for name in self.allowed or ways if name in ways] or list(ways)[:1]
        if len(names) > 1 and form not in self.times and len(self.times) < MOST_TIMED:
            plans = {name: ways[name]() for name in names}
            runs = {name: partial(plan, input, residual) for name, plan in plans.items()}
            self.times[form] = compare(runs, REPEATS, input.device, warmup=1, most=MOST_MS)
            chosen, _ = fastest(self.times[form])
            plan = plans[chosen]
        else:
            chosen = self._by_nearest(form, names) if len(names) > 1 else names[0]
            plan = ways[chosen]()
        self.first = self.first or chosen
        return plan

    def _by_nearest(self, form: Form, names: Iterable[str]) -> str:
        times = self.times.get(form) or self.times[min(self.times, key=partial(_distance, form))]
        return fastest({name: times[name] for name in names if name in times})[0]

    def __getstate__(self) -> dict[str, Any]:
        """Plans are for one kind of processor, and are made again."""
        return {**self.__dict__, "_ready": (None, {})}


def _distance(form: Form, other: Form) -> float:
    """The distance of two inputs in size; the batch counts twice."""

    def apart(a: float, b: float) -> float:
        return abs(math.log(max(a, 1) / max(b, 1)))

    return apart(form[0][0], other[0][0]) + apart(math.prod(form[0]), math.prod(other[0]))
