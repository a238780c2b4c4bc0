"""The plans of a packed layer: a function for each form of its input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fst.backends import Decision, Record, choose, registry
from fst.ops.packed import Packed

MOST_PLANS = 8
NOT_CALLED = Decision(Packed.operation, "", "not called for the example")
_CHOOSING = threading.RLock()


class Plans:
    """The plans of a layer, or of several that one backend computes.

    Attributes:
        record: the decisions, and the times on which they depend.
        allowed: the only backends that may be chosen, see `fst.backends.choose`; empty for all.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.allowed: tuple[str, ...] = ()
        self._ready: tuple[Any, dict[Any, Callable[[Any], Tensor]]] = (None, {})

    @property
    def decision(self) -> Decision:
        """The latest one."""
        return self.record.decisions.get(Packed.operation, NOT_CALLED)

    def run(self, operands: Packed, made_of: Any) -> Tensor:
        """The product, by the plan for operands of this form.

        Args:
            made_of: the weights; other ones need other plans.
        """
        known, plans = self._ready
        if known != made_of:
            plans = {}
            self._ready = made_of, plans  # at once, as other threads read it
        input, residual = operands.input, operands.residual
        added = None if residual is None else (residual.shape, residual.stride(), residual.dtype)
        form = input.shape, input.stride(), input.dtype, added, registry.demands
        plan = plans.get(form)
        if plan is None:
            with _CHOOSING, torch.inference_mode(False), torch.no_grad():
                plan, _ = choose(operands, self.record, self.allowed)
                while len(plans) >= MOST_PLANS:
                    plans.pop(next(iter(plans)))
                plans[form] = plan
        return plan(operands)

    def only(self, *names: str) -> None:
        """Choose from these backends alone from now on."""
        self.allowed, self._ready = names, (None, {})

    def __getstate__(self) -> dict[str, Any]:
        """Plans are for one kind of processor, and are made again."""
        return {**self.__dict__, "_ready": (None, {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Times of another machine do not count here."""
        self.__dict__.update(state)
        decisions = self.record.decisions
        self.record.restore(self.record.saved(), torch.device("cpu"))
        self.record.decisions = decisions
