"""The campaign: many random cases of what the library promises, counted.

    python -m tests.campaign --seed 0 --scale 1                       all kinds, a table
    python -m tests.campaign --kinds weights op --scale 4             four times as many of two
    python -m tests.campaign --only weights/swap_tensors-3            one case again
    python -m tests.campaign --json OUT.json --markdown docs/reliability.md

The exit status is 0 if every case held. docs/reliability.md says what the kinds are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich import progress
from rich.console import Console
from rich.table import Table

import fst
from tests.campaign import (
    choice,
    exports,
    files,
    frozen,
    kills,
    masks,
    op,
    operators,
    packed,
    sharded,
    signals,
    weights,
    zeros,
)

KINDS = {
    "weights": weights,
    "op": op,
    "operators": operators,
    "masks": masks,
    "choice": choice,
    "zeros": zeros,
    "frozen": frozen,
    "exports": exports,
    "packed": packed,
    "fsdp": sharded,
    "files": files,
    "kills": kills,
    "signals": signals,
}
COLUMNS = ("kind", "cases", "held", "failed", "seconds")
MARK = "<!-- campaign -->\n"
Cases = list[tuple[str, Callable[[random.Random], None]]]


def cases_of(kind: str, scale: float) -> Cases:
    """Name and check of each case: as many as its kind says times ``scale``, at least one."""
    return [
        (f"{kind}/{name}-{number}", check)
        for name, count, check in KINDS[kind].checks()
        for number in range(max(1, round(count * scale)))
    ]


def execute(
    cases: dict[str, Cases], seed: int, console: Console, again: str = ""
) -> tuple[list[tuple[Any, ...]], list[dict[str, str]]]:
    """Run all; the rows of the table, and the failures, which ``again`` and the name repeat."""
    rows, failures = [], []
    eta = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    shown = (progress.TextColumn("{task.description:8}"), progress.BarColumn(), *eta)
    with progress.Progress(*shown, progress.MofNCompleteColumn(), console=console) as bar:
        for kind, listed in cases.items():
            began, failed = time.monotonic(), 0
            for name, check in bar.track(listed, description=kind):
                try:
                    check(random.Random(f"{seed}/{name}"))
                except Exception as error:
                    failed += 1
                    failures.append({"name": name, "error": _line(error), "repeat": again + name})
                    console.out(f"{again}{name}\n    {_line(error)}", highlight=False)
            seconds = round(time.monotonic() - began)
            rows.append((kind, len(listed), len(listed) - failed, failed, seconds))
    return rows, failures


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _markdown(rows: list[tuple], seed: int, scale: float) -> str:
    lines = [
        f"fst {fst.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, seed {seed}, scale {scale:g}, {time.strftime('%Y-%m-%d')}.\n",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * (len(COLUMNS) - 1)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _write_between_marks(path: Path, text: str) -> None:
    parts = path.read_text().split(MARK)
    if len(parts) != 3:
        raise ValueError(f"{path} must have two lines {MARK.strip()!r} for the table.")
    path.write_text(f"{parts[0]}{MARK}{text}{MARK}{parts[2]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of cases")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kills", type=int, metavar="N", help="kills of each strategy")
    parser.add_argument("--only", metavar="PATTERN", help="these cases alone, by KIND/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and failures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table into FILE")
    arguments = parser.parse_args(argv)
    again = f"python -m tests.campaign --seed {arguments.seed} --scale {arguments.scale:g}"
    if arguments.kills is not None:
        kills.COUNT = arguments.kills / arguments.scale
        again += f" --kills {arguments.kills}"
    torch.set_num_threads(1)
    os.environ["FST_AUTOTUNE"] = "0"  # what samples is compared, also where exact is faster here
    cases = {kind: cases_of(kind, arguments.scale) for kind in arguments.kinds}
    if arguments.only:
        chosen = {k: [c for c in v if fnmatch(c[0], arguments.only)] for k, v in cases.items()}
        cases = {kind: listed for kind, listed in chosen.items() if listed}
    if not cases:
        parser.error(f"--only {arguments.only!r} matches none of the cases at this scale.")
    console = Console()
    rows, failures = execute(cases, arguments.seed, console, f"{again} --only ")
    table = Table(*COLUMNS, title=f"seed {arguments.seed}, scale {arguments.scale:g}")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    if arguments.json:
        counts = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        content = {"seed": arguments.seed, "scale": arguments.scale, "counts": counts}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content | {"failures": failures}, indent=1) + "\n")
    if arguments.markdown:
        _write_between_marks(arguments.markdown, _markdown(rows, arguments.seed, arguments.scale))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
