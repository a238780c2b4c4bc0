"""Trainings of a grid within some seconds, as many as fit, at once on one GPU; the rest later.

    python benchmarks/trainings.py GRID --work-dir DIR --seconds S

A training step of every setting is timed first (DIR/steps.json keeps the times). As many trainings
as fit into S seconds by these times run at once, one for each core at most; where one ends early,
the next begins. After S seconds all stop, and the same command goes on with them from their last
epochs. Writes the results of `fst ablate` for what has finished.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from equal_time import Times, timed

from fst.basics.arguments import add_traceback, positive, user_errors
from fst.basics.values import check_number
from fst.cli.environment import cores
from fst.cli.options.parsing import add_cfg_options
from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.results import collect, write
from fst.lab.ablation.runs import PlannedRun, make_runs, train

STEPS = "steps.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Time, train, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path, help="grid file, or fst::configs/ablation/...")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, required=True, help="of all trainings together")
    parser.add_argument("--epochs", type=positive, help="of each training (as the grid says)")
    add_cfg_options(parser, "changes to the configs of all settings")
    add_traceback(parser)
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    with user_errors(options, lambda: "stopped; the same command goes on from here"):
        check_number("--seconds", options.seconds, "(0, inf)")
        grid = load_grid(options.grid)
        changes = {**grid.options, **options.cfg_options}
        grid = replace(grid, options=changes, epochs=options.epochs or grid.epochs)
        names = grid.select(None)
        runs = make_runs(grid, names, grid.seeds)
        first = {run.setting: run for run in reversed(runs)}
        times = timed(options.work_dir / STEPS, first)
        waiting = [run for run in runs if not run.is_finished(options.work_dir)]
        fitting = fits(waiting, times, end - time.monotonic())
        named = "; ".join(map(str, waiting[:fitting]))
        print(f"{fitting} of {len(waiting)} trainings fit: {named}", flush=True)
        jobs = max(1, min(fitting, cores()))
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, max(end - time.monotonic(), 1e-3))
        try:
            train(waiting, options.work_dir, jobs, "1")
        except TimeoutError:
            print(f"stopped after {options.seconds:g} s")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        words = sys.argv[1:] if argv is None else argv
        command = shlex.join(["python", __file__, *words])
        write(collect(grid, options.work_dir, names), options.work_dir, command)
    left = [run for run in runs if not run.is_finished(options.work_dir)]
    print(f"{len(left)} trainings are left{': the same command goes on' if left else ''}")
    return 0


def fits(runs: Sequence[PlannedRun], times: Times, seconds: float) -> int:
    """The number of the first runs whose steps take no more than ``seconds``, one after another."""
    for count, run in enumerate(runs):
        seconds -= int(run.epochs) * times.seconds(run.setting)
        if seconds < 0:
            return count
    return len(runs)


def _stop(signum: int, frame: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    raise SystemExit(main())
