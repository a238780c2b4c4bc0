"""The commands that a work dir was made by, and what the last of them changed in the grid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, check_seeds

FILE = "invocation.json"


def read_invocation(work_dir: Path) -> dict[str, Any]:
    """The commands, and the seeds, epochs and options of the last; empty if there was none."""
    path = work_dir / FILE
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {"commands": [], "seeds": None, "epochs": None, "options": {}}


def write_invocation(invocation: Mapping[str, Any], work_dir: Path) -> None:
    """Replace the file in one step."""
    work_dir.mkdir(parents=True, exist_ok=True)
    write_text_atomically(json.dumps(invocation, indent=1) + "\n", work_dir / FILE)


def changed(grid: Grid, invocation: Mapping[str, Any]) -> Grid:
    """The grid with the seeds, epochs and options of a command.

    Raises:
        ValueError: the seeds are not different integers of 0 or more.
    """
    if invocation["seeds"] is not None:
        grid = replace(grid, seeds=check_seeds(invocation["seeds"], "--seeds"))
    if invocation["epochs"] is not None:
        grid = replace(grid, epochs=invocation["epochs"])
    return replace(grid, options={**grid.options, **invocation["options"]})
