"""The command line of `fst configs`."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from fst.basics.arguments import user_errors
from fst.cli.options import training as command_lines
from fst.cli.options.parsing import takes
from fst.cli.options.paths import packaged_configs
from fst.training.engine.config import load_config
from fst.training.engine.packaged import copy_configs


@takes(command_lines.configs)
def main(chosen: argparse.Namespace) -> int:
    """Print the names, print one as `fst train` uses it, or copy the folder."""
    with user_errors(chosen):
        if chosen.action == "copy":
            print(f"{copy_configs(chosen.folder)} files in {chosen.folder}")
            return 0
        if chosen.action == "show":
            print(load_config(chosen.config, chosen.cfg_options).pretty_text.rstrip())
            return 0
        names = [name for name in packaged_configs() if fnmatchcase(name, chosen.pattern)]
        if not names:
            raise ValueError(f"pattern={chosen.pattern!r} matches none of the package's configs.")
        print("\n".join(names))
    return 0
