"""The choices of a layer: decisions with their times, and shares of zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fst.backends import cache

MOST_SIZES = 8  # for which a layer measures an operation
MOST_ANSWERS = 64  # which a layer remembers
COUNTED = 16  # calls of a layer from one count of its zeros to the next
DENSE_STEPS = 64  # of a layer for which no backend gains, before they are compared again
STEPS = 8  # a share of zeros is known in eighths
MARGIN = 1 / 32  # by which a share must leave its eighth before another choice is made


class Decision(NamedTuple):
    """Which backend computes an operation for one key, and why.

    Attributes:
        key: the layer's key as JSON; "" where nothing was to be chosen.
        times: backend -> least milliseconds of a run, for the whole batch; infinite where it
            raised, empty where nothing was measured.
        left_out: the multiply-adds that are not done, in words; "" where all are.
    """

    operation: str
    key: str
    backend: str
    reason: str
    times: dict[str, float]
    left_out: str = ""


@dataclass
class Record:
    """The choices of a layer; part of its state, so that copies and checkpoints go on with them.

    Attributes:
        decisions: operation -> its latest decision.
        choices: (operation, key) as JSON -> backend, reason, times.
        times: (operation, key without zeros) as JSON -> backend -> milliseconds that a product
            without zeros would take.
        machine: on which the choices were measured, see `fst.backends.cache.environment`.
        shares: operand -> calls since its zeros were counted, and their share in eighths.
        answers: everything that a choice depends on -> the decision; of this process alone.
        dense_calls: a call for which no backend but the dense one was chosen -> for how many steps
            nothing else is looked at.
        found_dense: the calls of the step under way of which that was found.
        prepared: one of ``dense_calls`` -> what a layer keeps for it; of this process alone.
    """

    decisions: dict[str, Decision] = field(default_factory=dict)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: str = ""
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)
    dense_calls: dict[Hashable, int] = field(default_factory=dict)
    found_dense: set[Hashable] = field(default_factory=set)
    answers: dict[Hashable, Decision] = field(default_factory=dict)
    prepared: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "prepared": {}}

    def answer(self, asked: Hashable, decision: Decision) -> None:
        """Give the same answer to the same question, without looking at any backend again."""
        if len(self.answers) >= MOST_ANSWERS:
            self.answers.clear()
        self.answers[asked] = decision

    def has(self, decision: Decision) -> bool:
        """True if the layer has chosen the same."""
        chosen = self.choices.get(decision.key)
        return chosen is not None and chosen["backend"] == decision.backend

    def keep(self, decision: Decision, device: torch.device) -> None:
        """Choose the same wherever the layer meets these operands again."""
        self.machine = cache.path(cache.environment(device)).name
        self.choices[decision.key] = {
            name: getattr(decision, name) for name in ("backend", "reason", "times")
        }

    def usual(self, operation: str) -> str:
        """The most frequent choice of a layer that has met many sizes, else "".

        Images of ever new sizes, as detectors have, must not be measured for ever.
        """
        start = f'["{operation}"'
        chosen = [c["backend"] for key, c in self.choices.items() if key.startswith(start)]
        return max(chosen, key=chosen.count) if len(chosen) >= MOST_SIZES else ""

    def forget_shares(self) -> None:
        """Count zeros anew in the next call."""
        self.shares.clear()
        self.dense_calls.clear()
        self.found_dense.clear()
        self.prepared.clear()

    def end_step(self) -> None:
        """Know from now on which calls of the ended step were dense; forget it after some steps.

        So the calls of one step are computed alike, as activation checkpointing wants it.
        """
        known = {key: left - 1 for key, left in self.dense_calls.items() if left > 1}
        if len(known) < len(self.dense_calls):  # the op looks again, at the zeros too
            self.answers.clear()
            self.prepared.clear()
            self.shares = {name: (COUNTED, eighth) for name, (_, eighth) in self.shares.items()}
        self.dense_calls = known | dict.fromkeys(self.found_dense, DENSE_STEPS)
        self.found_dense.clear()

    def share(self, operand: str, count: Callable[[], float], *, trains: bool = True) -> float:
        """The share of zeros of an operand in eighths, counted in every 16th call that ``trains``.

        It moves to another eighth only where it has clearly left its own, so that no choice flips
        from step to step. An operand that is wholly zero, as gradients in a residual branch are in
        the first step where its last batch norm begins at zero, is counted again in the next call.
        Evaluation leaves no trace: a resumed run may evaluate less often.
        """
        calls, eighth = self.shares.get(operand, (COUNTED, -1))
        if not trains:
            return (nearest_eighth(count()) if eighth < 0 else eighth) / STEPS
        if calls >= COUNTED:
            calls, found = 0, count()
            if eighth in (-1, STEPS) or abs(eighth / STEPS - found) > 0.5 / STEPS + MARGIN:
                eighth = nearest_eighth(found)
            if eighth == STEPS:
                calls = COUNTED - 1
        self.shares[operand] = (calls + 1, eighth)
        return eighth / STEPS

    def saved(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        names = ("choices", "times", "machine", "shares", "dense_calls")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> str:
        """Take up what `saved` returned.

        Returns:
            another machine on which it was measured, where nothing is taken up; or "".
        """
        self.__dict__.update(Record().__dict__)
        here = cache.path(cache.environment(device)).name
        if saved and saved["machine"] not in ("", here):
            return str(saved["machine"])
        self.__dict__.update(copy.deepcopy(dict(saved)))
        return ""


def nearest_eighth(share: float) -> int:
    """A share of zeros as a number of eighths; all of them only where nothing else is there."""
    return min(round(share * STEPS), STEPS - (share < 1))
