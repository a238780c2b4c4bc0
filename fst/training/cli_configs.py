"""The command `fst configs`."""

from __future__ import annotations

import argparse
import shutil
from fnmatch import fnmatchcase

from fst.cli.options.paths import FOLDER, ROOT, SUFFIXES, packaged_configs


def main(chosen: argparse.Namespace) -> int:
    """Print the names, print one as `fst train` uses it, or copy the folder."""
    if chosen.action == "copy":
        if chosen.folder.exists():
            raise FileExistsError(f"{str(chosen.folder)!r} exists; name a folder that does not.")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / FOLDER, chosen.folder, ignore=ignored)
        count = sum(path.suffix in SUFFIXES for path in chosen.folder.rglob("*"))
        print(f"{count} files in {chosen.folder}")
        return 0
    if chosen.action == "show":
        from fst.training.engine.config import load_config  # takes seconds

        print(load_config(chosen.config, chosen.cfg_options).pretty_text.rstrip())
        return 0
    names = [name for name in packaged_configs() if fnmatchcase(name, chosen.pattern)]
    if not names:
        raise ValueError(f"pattern={chosen.pattern!r} matches none of the package's configs.")
    print("\n".join(names))
    return 0
