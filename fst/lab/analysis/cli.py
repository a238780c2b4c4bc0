"""The command line of `fst analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from fst.basics.arguments import user_errors
from fst.command_lines.analyze import parser
from fst.lab.analysis.commands import coverage, decay, macs
from fst.lab.arguments import command_of
from fst.lab.reporting.figures import SMALL, style
from fst.lab.reporting.markdown import publish

COMMANDS: dict[str, ModuleType] = {
    "coverage": coverage,
    "macs": macs,
    "decay": decay,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Analyse, write, print where."""
    chosen = parser().parse_args(argv)
    with user_errors(chosen), style(SMALL):
        document = COMMANDS[chosen.command].run(chosen)
        written = publish(document, chosen.out, command_of("analyze", argv))
    print("\n".join(f"written: {path}" for path in written))
    return 0
