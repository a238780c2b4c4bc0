"""The command line of `fst ablate`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from fst.basics.arguments import user_errors
from fst.basics.text import table
from fst.cli.environment import cores
from fst.lab.ablation.grid import check_seeds, load_grid
from fst.lab.ablation.results import collect, write
from fst.lab.ablation.runs import make_runs, refuse_changed, train
from fst.lab.document import command_of

TABLE_COLUMNS = 4  # of the results' table, on the console


def main(arguments: argparse.Namespace) -> int:
    """Run a grid; exit status 1 if a run has failed."""
    with user_errors(arguments, lambda: "stopped; the same command goes on from here"):
        return _ablate(arguments)


def _ablate(arguments: argparse.Namespace) -> int:
    grid = load_grid(arguments.grid)
    work_dir = arguments.work_dir or Path("work_dirs") / "ablation" / grid.path.stem
    grid = replace(
        grid,
        seeds=check_seeds(arguments.seeds or grid.seeds, "--seeds"),
        epochs=arguments.epochs or grid.epochs,
        options={**grid.options, **arguments.cfg_options},
    )
    names = grid.select(arguments.only)
    runs = make_runs(grid, names, grid.seeds)
    refuse_changed(runs, work_dir, "--work-dir")
    if arguments.dry_run:
        for run in runs:
            is_there = run.is_finished(work_dir)
            print(f"{run}: {run.epochs} epochs or iterations{', finished' if is_there else ''}")
        print(f"{len(runs)} runs, all configs are valid")
        return 0
    if arguments.report_only:
        done = all(run.is_finished(work_dir) for run in runs)
    else:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // arguments.jobs))
        done = train(runs, work_dir, arguments.jobs, threads)
    command = command_of("ablate", arguments).replace(" --report-only", "")
    (results,) = write(collect(grid, work_dir, names, grid.seeds), work_dir, command).tables
    rows = [["" if cell is None else cell for cell in row[:TABLE_COLUMNS]] for row in results.rows]
    print(f"\n{table(results.columns[:TABLE_COLUMNS], rows)}\n\nwritten: {work_dir / 'results.md'}")
    return 0 if done else 1
