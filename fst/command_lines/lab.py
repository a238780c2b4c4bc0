"""The command lines of the lab: ablations, reports, the demo."""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.arguments import positive
from fst.command_lines.options import Gone, add_cfg_options, command
from fst.strategies.registry import list_strategies

DEMONSTRATED = ["dense", "srste", "fst", "sampled", "sdgp"]


def ablate() -> argparse.ArgumentParser:
    """`fst ablate`."""
    parser = command(
        "ablate",
        "Train a grid of settings and seeds, and compare them with published numbers. "
        "The same command goes on where an earlier one stopped.",
    )
    parser.add_argument(
        "grid", type=Path, help="grid file, or a packaged one: fst::configs/ablation/..."
    )
    parser.add_argument(
        "--work-dir", type=Path, help="folder (default: work_dirs/ablation/<grid name>)"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="runs at once (default: 1)")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the grid's")
    parser.add_argument("--epochs", type=positive, help="per run, instead of the config's")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="only these settings")
    add_cfg_options(parser, "changes to the configs of all settings")
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="train runs again whose config has changed since (the old folders are renamed)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and list the runs")
    parser.add_argument(
        "--equal-time",
        action="store_true",
        help="first time a training step of every setting, in turns (with --dry-run nothing else), "
        "then train each for the time of the baseline's training, to the nearest whole epoch; "
        "default --work-dir: work_dirs/ablation/<grid name>_equal_time",
    )
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="write the results of what was run before: of the last command's epochs and options, "
        "and of every seed, where this one gives none",
    )
    parser.add_argument(
        "--submit",
        "--submit-options",
        action=Gone,
        instead="make each run a job of your own, `fst ablate GRID --only SETTING --seeds SEED`, "
        "and write the results with --report-only",
    )
    return parser


def demo() -> argparse.ArgumentParser:
    """`fst demo`."""
    parser = command(
        "demo",
        "Train dense and sparse networks on cluttered digits and compare them.",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=DEMONSTRATED,
        choices=list_strategies(),
        help=f"what to compare (default: {' '.join(DEMONSTRATED)})",
    )
    parser.add_argument("--epochs", type=positive, default=6, help="per run (default: 6)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="a run each (default: 0 1)"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, help="of PyTorch (default: 1, robust on busy cores)"
    )
    parser.add_argument("--repeats", type=positive, default=20, help="timings (default: 20)")
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/demo"), help="folder (default: work_dirs/demo)"
    )
    return parser


def report() -> argparse.ArgumentParser:
    """`fst report`."""
    parser = command(
        "report",
        "Write one self-contained HTML page about training runs, which come first, "
        "and ablations and analyses.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="work dir of `fst train` or `fst ablate`, output of `fst analyze`, or a "
        "folder of such",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="HTML file to write")
    parser.add_argument("--title", default="FST report", help="of the page (default: FST report)")
    return parser
