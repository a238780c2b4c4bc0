"""The command `fst`; `fst COMMAND --help` imports no torch."""

from fst.cli.commands import main

__all__ = ["main"]
