"""The configs that the package carries, named by their path in the repository.

`fst::configs/demo_digits.py` is the name of configs/demo_digits.py: in `_base_` of a config, where
MMEngine looks it up in fst/.mim, and on FST's command lines, where the suffix .py may be left out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mmengine.config.utils import MODULE2PACKAGE

from fst.basics.text import nearest

MODULE2PACKAGE["fst"] = "fst"  # the package whose folder MMEngine searches for `fst::`
SCOPE = "fst::"
ROOT = Path(__file__).resolve().parents[1] / ".mim" / "configs"
FOLDER = "configs"
SUFFIXES = (".py", ".yaml")
INHERITED = {"_base_", "settings"}  # folders of configs, and of grids, that cannot run alone


def packaged_configs() -> list[str]:
    """Names of all configs and grids, without those that are only inherited."""
    files = (path for path in (ROOT / FOLDER).glob("**/*") if path.suffix in SUFFIXES)
    names = (path.relative_to(ROOT) for path in files)
    return sorted(SCOPE + name.as_posix() for name in names if INHERITED.isdisjoint(name.parts))


def config_path(name: str) -> str:
    """The file of a packaged config; any other path as it is.

    Raises:
        FileNotFoundError: the package carries no such config.
    """
    if not name.startswith(SCOPE):
        return name
    for suffix in ("", *SUFFIXES):
        file = ROOT / (name.removeprefix(SCOPE) + suffix)
        if file.is_file():
            return str(file)
    known = packaged_configs()
    raise FileNotFoundError(
        f"{name!r} is no config of the package.{nearest(name, known)} `fst configs list` has all."
    )


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
