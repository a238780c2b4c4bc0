"""Accuracy over training time, measured and projected, from work dirs (SDGP, Figure 10).

    python benchmarks/papers/time_to_accuracy.py RUN RUN ... --target 98

Where no kernel makes use of the pruning, SDGP scales the time that was measured: of the share of a
training step that a pruned GEMM takes, n/m remains (one half for 2:4),

    projected = measured · (1 − Σ share(g) · (1 − density(g)))   over pruned GEMMs g without kernel.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from paper import drawing, main
from runtime import gemm_shares
from torch import nn

import fst
from fst.lab.document import Document
from fst.lab.figures import COLOURS, INK
from fst.lab.logs import read_run
from fst.rules.strategy import GEMMS, Strategy
from fst.training.engine.config import read_sparsity

EQUAL_SHARES = dict.fromkeys(GEMMS, 1 / 3)  # SDGP: "approximately one-third"
METRICS = ("accuracy/top1", "coco/bbox_mAP", "pascal_voc/mAP")


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


def simulated_densities(strategy: Strategy | None) -> dict[str, float]:
    """GEMM -> density, of the GEMMs that a strategy prunes but that take their dense time."""
    if strategy is None:
        return {}
    layer = nn.Sequential(nn.Conv2d(64, 64, 3)).double()  # in float64 no backend skips zeros
    report = fst.convert(layer, strategy).layers[0]
    pruned = {gemm: strategy.rule(gemm) for gemm in GEMMS}
    return {
        gemm: rule.density
        for gemm, rule in pruned.items()
        if rule and report.gemms[gemm].mode == "simulated" and rule.density < 1
    }


def projection_factor(densities: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Projected over measured time; see the module's formula."""
    return 1 - sum(shares[gemm] * (1 - density) for gemm, density in densities.items())


def projected(curve: TimedCurve, factor: float) -> TimedCurve:
    """``curve`` with its time multiplied by ``factor``."""
    seconds = tuple(second * factor for second in curve.seconds)
    return TimedCurve(curve.label, "projected", seconds, curve.values)


def draw(curves: Sequence[TimedCurve], metric: str, target: float | None) -> Figure:
    """Metric over time: solid lines are measured, dashed ones projected."""
    figure = drawing(8, 4.4)
    axis = figure.subplots()
    labels = list(dict.fromkeys(curve.label for curve in curves))
    for curve in curves:
        line = "-" if curve.kind == "measured" else "--"
        axis.plot(
            curve.seconds,
            curve.values,
            line,
            marker="o",
            markersize=3,
            color=COLOURS[labels.index(curve.label) % len(COLOURS)],
            label=f"{curve.label} ({curve.kind})",
        )
    if target is not None:
        axis.axhline(target, color=INK, linewidth=0.8, linestyle=":")
    axis.set(xlabel="training time (s)", ylabel=metric)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("runs", nargs="+", type=Path, help="work dirs of `fst train`")
    parser.add_argument(
        "--metric", help=f"of the validation (default: the first found of {', '.join(METRICS)})"
    )
    parser.add_argument("--target", type=float, help="also tabulate the time to reach this value")
    parser.add_argument(
        "--benchmark",
        type=Path,
        help="JSON of `fst bench`, from which each GEMM's share of a step is taken "
        "(default: one third each, SDGP's assumption)",
    )


def run(options: argparse.Namespace) -> Document:
    """Read the runs, project where nothing was accelerated."""
    shares = EQUAL_SHARES
    if options.benchmark:
        shares = gemm_shares(json.loads(options.benchmark.read_text(encoding="utf-8")))
    curves: list[TimedCurve] = []
    factors = []
    for folder in options.runs:
        log = read_run(folder)
        metric = options.metric or next((m for m in METRICS if m in log.validation), None)
        if metric not in log.validation:
            known = ", ".join(log.validation) or "nothing"
            raise ValueError(f"{folder}: no metric {metric or METRICS}; it has: {known}.")
        values = log.validation[metric]
        pace = read_pace(folder, by_epoch=log.x_label == "epoch")
        curve = TimedCurve(
            folder.name, "measured", tuple(pace.seconds_at(list(values))), tuple(values.values())
        )
        strategy, _ = read_sparsity(log.config)
        densities = simulated_densities(strategy)
        factor = projection_factor(densities, shares)
        factors.append(
            [
                folder.name,
                strategy.name if strategy else "dense",
                ", ".join(densities) or "none",
                factor,
            ]
        )
        curves.append(curve)
        if densities:
            curves.append(projected(curve, factor))
    result = Document(
        "Time to accuracy",
        "Training time without validation. Measured: as the runs logged it. Projected, for runs "
        "that prune GEMMs for which there is no kernel here: measured · (1 − Σ share(g) · (1 − "
        "density(g))) over those GEMMs g, as in SDGP; a 2:4 GEMM is taken to be twice as fast. "
        "Shares of a dense step: "
        + ", ".join(f"{gemm} {shares[gemm]:.1%}" for gemm in GEMMS)
        + (f" ({options.benchmark})." if options.benchmark else " (assumed: one third each)."),
    )
    columns = ["run", "time is", "last value", "best value", "seconds in all"]
    rows = [[c.label, c.kind, c.values[-1], max(c.values), c.seconds[-1]] for c in curves]
    if options.target is not None:
        columns.append(f"seconds to {options.target:g}")
        rows = [[*row, c.time_to(options.target)] for row, c in zip(rows, curves, strict=True)]
    result.add_table(f"{metric} over time", columns, rows)
    result.add_table(
        "Projection", ["run", "strategy", "GEMMs pruned without kernel", "factor"], factors
    )
    figure = draw(curves, metric, options.target)
    caption = "Solid: measured; dashed: projected by SDGP's rule (SDGP, Figure 10)."
    result.add_figure("Time to accuracy", "time_to_accuracy", caption, figure, options.out)
    return result


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
