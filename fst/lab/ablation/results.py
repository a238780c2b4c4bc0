"""Results of a grid: the logs of its runs, means and intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from fst.lab.ablation.configs import PlannedRun, make_runs
from fst.lab.ablation.folders import RunFolder
from fst.lab.ablation.grid import Grid, Metric
from fst.lab.reporting.runs import RunLog, is_run, read_run

CONFIDENCE = 0.95  # of every interval
INTERVAL = f"a {CONFIDENCE:.0%} interval (Student's t over the seeds)"


@dataclass(frozen=True)
class RunResult:
    """One run: its state ('finished', 'failed', 'unfinished') and its log, if it has one.

    A run of another config than the grid's is 'changed', and nothing of it is read.
    """

    setting: str
    seed: int
    state: str
    log: RunLog | None
    made: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def final(self, metric: Metric) -> float:
        """The metric after the last validation, scaled; NaN if it was not logged."""
        curve = self.log.validation.get(metric.key) if self.log else None
        return metric.scale * curve[max(curve)] if curve else math.nan


@dataclass(frozen=True)
class Summary:
    """Mean over the seeds, and how far an interval reaches from it."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN without a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN for fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def interval(self) -> float:
        """Half of the mean's `CONFIDENCE` interval, by Student's t; NaN for fewer than two values.

        That of differences between pairs is the paired t interval.
        """
        count = len(self.values)
        if count < 2:
            return math.nan
        return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * self.std / math.sqrt(count)

    def __str__(self) -> str:
        if not self.values:
            return "–"
        return f"{self.mean:.2f}" + (f" ± {self.interval:.2f}" if len(self.values) > 1 else "")


@dataclass(frozen=True)
class Results:
    """All the runs of a grid that left something in the work dir."""

    grid: Grid
    runs: tuple[RunResult, ...]

    def of(self, setting: str) -> list[RunResult]:
        """The finished runs of a setting."""
        return [r for r in self.runs if r.setting == setting and r.state == "finished"]

    def summary(self, setting: str, metric: Metric) -> Summary:
        """A metric over the finished runs of a setting."""
        values = [run.final(metric) for run in self.of(setting)]
        return Summary(tuple(value for value in values if not math.isnan(value)))

    def change(self, setting: str, baseline: str, metric: Metric) -> Summary:
        """Differences from another setting, of the seeds that both have finished."""
        before = {run.seed: run.final(metric) for run in self.of(baseline)}
        found = [
            run.final(metric) - before[run.seed] for run in self.of(setting) if run.seed in before
        ]
        return Summary(tuple(value for value in found if not math.isnan(value)))

    def measured(self) -> list[str]:
        """The settings with a finished run."""
        return [name for name in self.grid.settings if self.of(name)]


def collect(
    grid: Grid, work_dir: Path, names: Sequence[str], seeds: Collection[int] | None = None
) -> Results:
    """Read the runs of the settings ``names`` in ``work_dir``: of ``seeds``, or of every seed."""
    settings = {name: setting for name, setting in grid.settings.items() if name in names}
    shown = replace(
        grid,
        settings=settings,
        baseline=grid.baseline if grid.baseline in settings else None,
    )
    runs: list[RunResult] = []
    for name in settings:
        there = [path.name[4:] for path in (work_dir / name).glob("seed*")]
        found = sorted(int(seed) for seed in there if seed.isdigit())
        found = [seed for seed in found if seeds is None or seed in seeds]
        try:
            planned = make_runs(grid, grid.chain(name), found, check=False)
        except ValueError as error:  # what was changed in all settings does not fit this one
            runs += [RunResult(name, seed, "changed", None, reason=str(error)) for seed in found]
            continue
        runs += [_read(work_dir, run) for run in planned if run.setting == name]
    return Results(shown, tuple(runs))


def _read(work_dir: Path, run: PlannedRun) -> RunResult:
    folder = RunFolder.of(work_dir, run.setting, run.seed)
    if folder.state(run) == "changed":
        return RunResult(run.setting, run.seed, "changed", None, reason=folder.changes(run))
    made, finished, failed = map(folder.read, ("run.json", "finished.json", "failed.json"))
    state = "finished" if finished else "failed" if failed else "unfinished"
    log = read_run(folder.path) if is_run(folder.path) else None
    reason = failed.get("reason", "")
    return RunResult(run.setting, run.seed, state, log, finished or made, reason)
