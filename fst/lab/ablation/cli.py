"""The command line of `fst ablate`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fst.basics.arguments import STOP_SIGNALS, raise_stop, signals_handled, user_errors
from fst.cli.environment import cores
from fst.cli.options import lab as command_lines
from fst.cli.options.parsing import takes
from fst.lab.ablation.configs import PlannedRun, make_runs, parse_options
from fst.lab.ablation.grid import Grid, load_grid
from fst.lab.ablation.invocation import changed, read_invocation, write_invocation
from fst.lab.ablation.results import collect
from fst.lab.ablation.run import TRAIN, Trainer
from fst.lab.ablation.table import write
from fst.lab.arguments import command_of
from fst.lab.reporting.document import Document
from fst.training.engine.checkpoint import refuse_no_folder

TABLE_COLUMNS = 4  # of the results' first table, on the console


@takes(command_lines.ablate)
def main(arguments: argparse.Namespace, *, train: Sequence[str] = TRAIN) -> int:
    """Run a grid; ``train``: see `Trainer`. Exit status: 0, 1 if a run failed, 2 bad input."""
    with (
        user_errors(arguments, lambda: "stopped; the same command goes on from here"),
        signals_handled(STOP_SIGNALS, raise_stop),
    ):
        return _ablate(arguments, train)


def _ablate(arguments: argparse.Namespace, train: Sequence[str]) -> int:
    console = Console()
    grid = load_grid(arguments.grid)
    work_dir = arguments.work_dir or Path("work_dirs") / "ablation" / grid.path.stem
    refuse_no_folder(work_dir)
    invocation = _invocation(arguments, work_dir)
    grid = changed(grid, invocation)
    command = " && ".join(invocation["commands"])
    names = grid.select(arguments.only)
    if arguments.report_only:
        _report(grid, work_dir, names, invocation["seeds"], command, console)
        return 0
    runs = make_runs(grid, names, grid.seeds)
    trainer = Trainer(
        work_dir=work_dir,
        train=train,
        jobs=arguments.jobs,
        threads=_threads(arguments),
        metric=grid.metric.key,
        console=console,
    )
    if arguments.dry_run:
        _print_plan(runs, trainer, console)
        return 0
    _put_changed_aside(runs, trainer, arguments.rerun, console)
    write_invocation(invocation, work_dir)
    failures = trainer.train(runs)
    made = [name for name in grid.settings if name in names or (work_dir / name).is_dir()]
    _report(grid, work_dir, made, None, command, console)
    for failure in failures:
        run = failure.run
        first = failure.reason.splitlines()[0]
        log = trainer.folder(run).path / "log.txt"
        console.print(f"failed: {run.setting}, seed {run.seed}: {first} (see {log})", markup=False)
    return 1 if failures else 0


def _invocation(arguments: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The commands so far and what this one changes in the grid.

    With --report-only: the earlier commands, and what this one says otherwise than the last.
    """
    earlier = read_invocation(work_dir)
    seeds, epochs = arguments.seeds, arguments.epochs
    options = parse_options(arguments.cfg_options, "--cfg-options")
    if arguments.report_only:
        if not earlier["commands"]:
            raise FileNotFoundError(f"--report-only: nothing was run in {str(work_dir)!r}.")
        epochs = earlier["epochs"] if epochs is None else epochs
        options = {**earlier["options"], **options}
        commands = earlier["commands"]
    else:
        commands = list(dict.fromkeys([*earlier["commands"], command_of("ablate", arguments)]))
    return {"commands": commands, "seeds": seeds, "epochs": epochs, "options": options}


def _threads(arguments: argparse.Namespace) -> int:
    """OMP_NUM_THREADS of each run: the user's, or this machine's cores shared out."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, cores() // arguments.jobs)


def _print_plan(runs: Sequence[PlannedRun], trainer: Trainer, console: Console) -> None:
    table = Table("setting", "seed", "epochs", "starts from", "state", box=box.SIMPLE)
    for run in runs:
        state = trainer.folder(run).state(run)
        start = run.start_from or ""
        table.add_row(run.setting, str(run.seed), str(run.length), start, state)
    console.print(table)
    console.print(f"{len(runs)} runs, all configs are valid; {trainer.threads} thread(s) each")


def _put_changed_aside(
    runs: Sequence[PlannedRun],
    trainer: Trainer,
    allowed: bool,
    console: Console,
) -> None:
    for run in runs:
        folder = trainer.folder(run)
        if folder.state(run) != "changed":
            continue
        if not allowed:
            raise ValueError(
                f"{folder.path} was trained with another config ({folder.changes(run)}). Train it "
                "again with --rerun, or give another --work-dir."
            )
        try:
            aside = folder.put_aside()
        except RuntimeError as error:
            raise ValueError(f"--rerun: {error}") from error
        console.print(f"{folder.path} has another config: now {aside.name}")


def _report(
    grid: Grid,
    work_dir: Path,
    names: Sequence[str],
    seeds: Collection[int] | None,
    command: str,
    console: Console,
) -> None:
    document = write(collect(grid, work_dir, names, seeds), work_dir, command)
    console.print(_console_table(document))
    for note in document.notes:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(f"wrote {work_dir / 'results.md'}", markup=False, highlight=False)


def _console_table(document: Document) -> Table:
    first = document.tables[0]
    shown = range(min(TABLE_COLUMNS, len(first.columns)))
    table = Table(*(first.columns[i] for i in shown), box=box.SIMPLE, title=document.title)
    for row in first.rows:
        table.add_row(*("" if row[i] is None else str(row[i]) for i in shown))
    return table
