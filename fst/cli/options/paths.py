"""Paths on a command line, which are checked before imports that take seconds.

`fst::configs/demo_digits.py` is the name of configs/demo_digits.py in the package, with or without
the suffix .py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.text import nearest

SCOPE = "fst::"
ROOT = Path(__file__).resolve().parents[2] / ".mim" / "configs"
FOLDER = "configs"
SUFFIXES = (".py", ".yaml")
INHERITED = {"_base_", "settings"}  # folders of configs, and of grids, that cannot run alone
KINDS = {  # of files that are read, by the argument that names them
    "config": "config",
    "configs": "config",
    "grid": "grid",
    "checkpoint": "checkpoint",
    "resume": "checkpoint",
}
NO_PATHS = ("", "auto")  # of --resume


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


def check_read(given: argparse.Namespace) -> None:
    """Check that the configs, grids and checkpoints that a command reads are there.

    Other packages' configs, and addresses of checkpoints, are looked up later.

    Raises:
        FileNotFoundError: one is not there, or is no file.
    """
    for argument, kind in KINDS.items():
        value = getattr(given, argument, None)
        for name in map(str, value if isinstance(value, list) else [value or ""]):
            path = config_path(name)
            elsewhere = path in NO_PATHS or "::" in path or "://" in path
            if not elsewhere and not Path(path).expanduser().is_file():
                packaged = f"configs/{Path(name).name}"
                known = packaged_configs() if argument == "config" else ()
                hint = f" Did you mean {SCOPE}{packaged}?" if SCOPE + packaged in known else ""
                raise FileNotFoundError(f"{kind} {name!r} does not exist or is no file.{hint}")


def check_out(out: str, checkpoint: str) -> None:
    """Check that what is made of a checkpoint can be written to the argument OUT.

    Raises:
        FileNotFoundError: its folder does not exist.
        ValueError: it is a folder, or the checkpoint.
    """
    path = Path(out)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of OUT={out!r} does not exist.")
    if path.is_dir():
        raise ValueError(f"OUT={out!r} is a folder; it must be a file.")
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise ValueError(f"OUT={out!r} is the checkpoint, which would be lost: name another file.")
