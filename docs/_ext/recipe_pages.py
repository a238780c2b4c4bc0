"""Two tables: the configs that the package carries, and the grids of the papers' tables."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from config_files import CONFIGS, GRIDS, ROOT, packaged_name, strategy_of, summary_of
from pages import page, table, toctree

from fst.lab.ablation.grid import load_grid

CONFIGS_TEXT = """\
Every config that the package carries, in the words of its first line. `fst train NAME` trains one,
`_base_ = "NAME"` inherits it, `fst configs copy FOLDER` copies them all. What stands in a config:
[configs](../configs.md)."""
GRIDS_TEXT = """\
Each file names settings, seeds and, where there are any, published numbers. `fst ablate NAME`
trains what is missing and writes the table beside the published one."""


def pages() -> dict[str, str]:
    """Path under docs/ -> text."""
    return {
        "recipes/index.md": page("# Recipes", CONFIGS_TEXT, *_configs(), toctree(["grids"])),
        "recipes/grids.md": page("# The papers' tables as grids", GRIDS_TEXT, _grids()),
    }


def _link(file: Path) -> str:
    return f"[`{packaged_name(file)}`](../../{file.relative_to(ROOT).as_posix()})"


def _configs() -> list[str]:
    parts = []
    for folder, files in groupby(sorted(CONFIGS, key=lambda file: file.parent), lambda f: f.parent):
        rows = [(_link(file), strategy_of(file) or "", summary_of(file)) for file in files]
        parts.append(f"## {folder.relative_to(ROOT).as_posix()}")
        parts.append(table(("config", "strategy", "what it is"), rows))
    return parts


def _grids() -> str:
    rows = []
    for file in GRIDS:
        grid = load_grid(file)
        numbers = "; ".join(column.source for column in grid.published)
        rows.append((_link(file), grid.title, str(len(grid.settings)), numbers))
    return table(("grid", "title", "settings", "published numbers"), rows)
