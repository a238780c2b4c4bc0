"""The configs that the package carries, for MMEngine and for those who copy them.

MMEngine looks up `fst::configs/demo_digits.py` in `_base_` of a config below fst/.mim.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mmengine.config.utils import MODULE2PACKAGE

from fst.cli.options.paths import FOLDER, ROOT, SUFFIXES

MODULE2PACKAGE["fst"] = "fst"  # the package whose folder MMEngine searches for `fst::`


def drop_scope(value: Any) -> None:
    """Take away the mark by which MMEngine would look for a registry of this package's own."""
    if isinstance(value, dict):
        if value.get("_scope_") == "fst":
            del value["_scope_"]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            drop_scope(part)


def copy_configs(target: Path) -> int:
    """Copy the folder of configs to ``target`` and return how many files it holds.

    Raises:
        FileExistsError: ``target`` exists.
    """
    if target.exists():
        raise FileExistsError(f"{str(target)!r} exists; name a folder that does not.")
    shutil.copytree(ROOT / FOLDER, target, ignore=shutil.ignore_patterns("__pycache__"))
    return sum(path.suffix in SUFFIXES for path in target.rglob("*"))
