"""The command line of `fst configs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fst.basics.arguments import add_traceback, user_errors
from fst.engine.packaged import copy_configs, packaged_configs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the names, or copy the folder."""
    parser = argparse.ArgumentParser(
        prog="fst configs",
        description="The configs of the package: `fst train fst::configs/demo_digits.py` trains "
        'one, and `_base_ = "fst::configs/demo_digits.py"` inherits it.',
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy")
    listing = actions.add_parser("list", help="print their names")
    listing.add_argument("pattern", nargs="?", default="*", help="glob, such as '*resnet50*'")
    copying = actions.add_parser("copy", help="copy all of them, to change them")
    copying.add_argument("folder", type=Path, help="folder to make")
    for action in (listing, copying):
        add_traceback(action)
    chosen = parser.parse_args(argv)
    with user_errors(chosen):
        if chosen.action == "copy":
            print(f"{copy_configs(chosen.folder)} files in {chosen.folder}")
            return 0
        names = [name for name in packaged_configs() if fnmatchcase(name, chosen.pattern)]
        if not names:
            raise ValueError(f"pattern={chosen.pattern!r} matches none of the package's configs.")
        print("\n".join(names))
    return 0
