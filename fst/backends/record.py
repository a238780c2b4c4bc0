"""The knowledge by which a layer chooses its backends: measured times, and shares of zeros."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fst.backends import store

MOST_SIZES = 8  # for which a layer measures an operation
COUNTED = 16  # steps from one count of a layer's zeros to the next
STEPS = 8  # a share of zeros is known in eighths
MARGIN = 1 / 32  # by which a share must leave its eighth before another choice is made

Times = dict[str, float]  # backend -> milliseconds


class Decision(NamedTuple):
    """Which backend computes an operation for one form of operands, and why.

    Attributes:
        times: backend -> least milliseconds of a run, for the whole batch; infinite where it
            raised, empty where nothing was measured.
        skipped: which multiply-adds are skipped, as text; "" where none are.
    """

    operation: str
    backend: str
    reason: str
    times: Times = {}
    skipped: str = ""

    @property
    def measured(self) -> str:
        """The times as text."""
        return ", ".join(f"{name} {time:.3g}" for name, time in self.times.items())


@dataclass
class Record:
    """A part of a layer's state, so that copies and checkpoints choose the same backends.

    Attributes:
        decisions: operation -> its latest decision.
        times: key of an operation as JSON -> backend -> milliseconds that a product without zeros
            would take.
        machine: on which they were measured, see `fst.backends.store.environment`.
        shares: operand -> its share of zeros in eighths.
        moved: whether a share has moved since the last step.
        counting: whether zeros are counted in this step.
    """

    decisions: dict[str, Decision] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    machine: str = ""
    shares: dict[str, int] = field(default_factory=dict)
    moved: bool = False
    counting: bool = True

    def begin(self, step: int) -> None:
        """Say whether zeros are counted in this step.

        An operand that was wholly zero, as gradients in a residual branch are in the first step
        where its last batch norm begins at zero, is counted again in the next step.
        """
        self.counting = step % COUNTED == 0 or STEPS in self.shares.values()

    def count(self, operand: str, share: float) -> None:
        """Take note of an operand's share of zeros.

        It moves to another eighth only where it has clearly left its own, so that no choice flips
        from count to count.
        """
        eighth = self.shares.get(operand)
        if eighth in (None, STEPS) or abs(eighth / STEPS - share) > 0.5 / STEPS + MARGIN:
            self.shares[operand] = nearest_eighth(share)
            self.moved |= eighth not in (None, self.shares[operand])

    def keep(self, key: str, times: Times, device: torch.device) -> None:
        """Choose by these times wherever the layer meets such operands again."""
        self.machine = store.path(store.environment(device)).name
        self.times[key] = times

    def saved(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {n: copy.deepcopy(getattr(self, n)) for n in ("times", "machine", "shares")}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> str:
        """Take up what `saved` returned.

        Returns:
            another machine on which it was measured, where nothing is taken up; or "".
        """
        self.__dict__.update(Record().__dict__)
        here = store.path(store.environment(device)).name
        if saved and saved["machine"] not in ("", here):
            return str(saved["machine"])
        self.__dict__.update(copy.deepcopy(dict(saved)))
        return ""


def nearest_eighth(share: float) -> int:
    """A share of zeros as a number of eighths; all of them only where nothing else is there."""
    return min(round(share * STEPS), STEPS - (share < 1))
