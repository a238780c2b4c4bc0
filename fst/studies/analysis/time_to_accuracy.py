"""Accuracy over training time: as measured, and as projected by SDGP's rule (Figure 10).

Where no kernel makes use of the pruning, SDGP scales the time that was measured: of the share of a
training step that a pruned GEMM takes, n/m remains (one half for 2:4),

    projected = measured · (1 − Σ share(g) · (1 − density(g)))   over pruned GEMMs g without kernel.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import fst
from fst.rules.strategy import GEMMS, Strategy

EQUAL_SHARES = dict.fromkeys(GEMMS, 1 / 3)  # SDGP: "approximately one-third"


@dataclass(frozen=True)
class TimedCurve:
    """A run's validation results.

    Attributes:
        kind: "measured" or "projected".
        seconds: of training (validation not counted) before each validation.
    """

    label: str
    kind: str
    seconds: tuple[float, ...]
    values: tuple[float, ...]

    def time_to(self, target: float) -> float | None:
        """Seconds until ``target`` was first reached; None if it never was."""
        pairs = zip(self.seconds, self.values, strict=True)
        return next((seconds for seconds, value in pairs if value >= target), None)


@dataclass(frozen=True)
class Pace:
    """Seconds per iteration of a run, in stretches.

    Attributes:
        ends: last iteration of each stretch, ascending.
        seconds_each: per iteration of the stretch that ends there.
        per_epoch: iterations of an epoch; None where validations are counted in iterations.
    """

    ends: tuple[int, ...]
    seconds_each: tuple[float, ...]
    per_epoch: int | None = None

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Training time up to each step (epoch, or iteration); beyond the last stretch its speed
        goes on.
        """
        starts = (0, *self.ends[:-1])
        lengths = [end - start for start, end in zip(starts, self.ends, strict=True)]
        spent = [n * each for n, each in zip(lengths, self.seconds_each, strict=True)]
        clock = (0.0, *itertools.accumulate(spent))
        found = []
        for step in steps:
            iteration = step * (self.per_epoch or 1)
            place = min(bisect.bisect_left(self.ends, iteration), len(self.ends) - 1)
            each = self.seconds_each[place]
            found.append(clock[place] + (iteration - starts[place]) * each)
        return found


def read_pace(folder: Path, by_epoch: bool) -> Pace:
    """From the logs of a run of `fst train`; a resumed run overrides what it repeats.

    Raises:
        ValueError: no time per iteration was logged.
    """
    found: dict[int, tuple[int, float]] = {}
    for path in sorted(folder.glob("*/vis_data/scalars.json")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for entry in map(json.loads, (line for line in lines if line.endswith("}"))):
            if "iter" in entry and "time" in entry:
                found[int(entry["iter"])] = (int(entry.get("epoch", 0)), float(entry["time"]))
    if not found:
        raise ValueError(f"{folder}: no time per iteration was logged.")
    ends = tuple(sorted(found))
    firsts: dict[int, int] = {}
    for end in ends:
        firsts.setdefault(found[end][0], end)
    epochs = sorted(firsts)
    if len(epochs) > 1:  # logged at the same iterations of each epoch, not always at its last
        per_epoch = round((firsts[epochs[-1]] - firsts[epochs[0]]) / (epochs[-1] - epochs[0]))
    else:
        per_epoch = ends[-1]
    each = tuple(found[end][1] for end in ends)
    return Pace(ends, each, per_epoch if by_epoch else None)


def simulated_densities(
    strategy: Strategy | None, plan: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """GEMM -> density, of the GEMMs that a strategy prunes but that take their dense time.

    Raises:
        ValueError: these are others in the layers that ``plan`` names: how long such layers take
            nobody has measured.
    """
    if strategy is None:
        return {}
    found = _simulated_densities(strategy, None)
    for name, options in (plan or {}).items():
        if _simulated_densities(strategy, {"0": options}) != found:
            raise ValueError(
                f"plan, layer {name!r}: {options!r} beside the simulated grad_weight of strategy "
                f"{strategy.name!r}; only a grad_weight that is the same in all layers, or "
                "simulated in none, can be projected."
            )
    return found


def _simulated_densities(strategy: Strategy, plan: Mapping[str, Any] | None) -> dict[str, float]:
    model = nn.Sequential(nn.Conv2d(64, 64, 3))
    report = fst.convert(model, strategy, plan=plan).layers[0]
    own = fst.sparse_layers(model)["0"].strategy
    return {
        gemm: own.rule(gemm).density
        for gemm in GEMMS
        if report.gemms[gemm].mode == "simulated" and own.rule(gemm).density < 1
    }


def projection_factor(densities: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Projected over measured time; see the module's formula."""
    return 1 - sum(shares[gemm] * (1 - density) for gemm, density in densities.items())


def projected(curve: TimedCurve, factor: float) -> TimedCurve:
    """``curve`` with its time multiplied by ``factor``."""
    seconds = tuple(second * factor for second in curve.seconds)
    return TimedCurve(curve.label, "projected", seconds, curve.values)
