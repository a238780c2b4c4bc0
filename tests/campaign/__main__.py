"""The campaign: many random cases of what the library promises, counted.

    python -m tests.campaign --seed 0 --scale 1                       all kinds, a table
    python -m tests.campaign --kinds weights op --scale 4             four times as many of two
    python -m tests.campaign --only weights/swap_tensors-3            one case again

The exit status is 0 if every case held. docs/reliability.md says what the kinds are.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch

import torch

from fst.basics.text import table

KINDS = (
    *("weights", "op", "operators", "masks", "choice", "zeros", "frozen", "exports", "packed"),
    *("compiled", "foreign", "sharded", "files", "kills"),
)
COLUMNS = ("kind", "cases", "held", "failed", "seconds")
Cases = list[tuple[str, Callable[[random.Random], None]]]


def cases_of(kind: str, scale: float) -> Cases:
    """Name and check of each case: as many as its kind says times ``scale``, at least one."""
    checks = importlib.import_module(f"tests.campaign.{kind}").checks()
    return [
        (f"{kind}/{name}-{number}", check)
        for name, count, check in checks
        for number in range(max(1, round(count * scale)))
    ]


def failures_of(cases: Cases, seed: int) -> dict[str, str]:
    """Run all; name of each that failed -> its error."""
    failed = {}
    for name, check in cases:
        try:
            check(random.Random(f"{seed}/{name}"))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of cases")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="these, by KIND/NAME")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["FST_AUTOTUNE"] = "0"  # what samples is compared, also where exact is faster here
    rows, again = [], f"python -m tests.campaign --seed {options.seed} --scale {options.scale:g}"
    for kind in options.kinds:
        cases = [c for c in cases_of(kind, options.scale) if fnmatch(c[0], options.only)]
        if not cases:
            continue
        began = time.monotonic()
        failed = failures_of(cases, options.seed)
        seconds = round(time.monotonic() - began)
        rows.append((kind, len(cases), len(cases) - len(failed), len(failed), seconds))
        print(f"{kind}: {len(cases)} cases in {seconds} s", file=sys.stderr, flush=True)
        for name, error in failed.items():
            print(f"{again} --only {name}\n    {error}", flush=True)
    if not rows:
        parser.error(f"--only {options.only!r} matches none of the cases at this scale.")
    print(table(COLUMNS, rows, markdown=True))
    return int(any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
