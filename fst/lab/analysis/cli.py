"""The command line of `fst analyze`."""

from __future__ import annotations

import argparse

from fst.basics.arguments import user_errors
from fst.cli.options.analyze import parser
from fst.cli.options.parsing import takes
from fst.lab.analysis.commands import macs
from fst.lab.arguments import command_of
from fst.lab.reporting.figures import SMALL, style
from fst.lab.reporting.markdown import publish


@takes(parser)
def main(chosen: argparse.Namespace) -> int:
    """Analyse, write, print where."""
    with user_errors(chosen), style(SMALL):
        document = macs.run(chosen)
        written = publish(document, chosen.out, command_of("analyze", chosen))
    print("\n".join(f"written: {path}" for path in written))
    return 0
