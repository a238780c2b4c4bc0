"""The command line of `fst analyze`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from fst.basics.arguments import add_traceback, user_errors
from fst.studies.analysis.commands import (
    coverage,
    decay,
    macs,
    options,
    pareto,
    saliency,
)
from fst.studies.arguments import command_of
from fst.studies.reporting.figures import SMALL, style

COMMANDS: dict[str, ModuleType] = {
    "coverage": coverage,
    "macs": macs,
    "saliency": saliency,
    "pareto": pareto,
    "decay": decay,
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="fst analyze",
        description="Numbers about a model of your own. Every subcommand writes a folder with "
        "figures (PNG), tables (analysis.md) and analysis.json, which `fst report` shows.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        subparser = subparsers.add_parser(name, help=text, description=text)
        module.add_arguments(subparser)
        options.add_output(subparser, name)
        add_traceback(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Analyse, write, print where."""
    chosen = make_parser().parse_args(argv)
    with user_errors(chosen), style(SMALL):
        result = COMMANDS[chosen.command].run(chosen)
        written = result.save(chosen.out, command_of("analyze", argv))
    print("\n".join(f"written: {path}" for path in written))
    return 0
