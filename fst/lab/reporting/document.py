"""Tables and figures with what is needed to make them again: a folder with an analysis.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fst.files.checkpoint import write_text_atomically

if TYPE_CHECKING:
    import matplotlib.figure

FILE_NAME = "analysis.json"
DIGITS = 4  # significant ones, of numbers that come as floats
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Table:
    """A table; cells are texts, numbers or None (empty). The page folds a ``folded`` one."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure; ``file`` is a PNG, relative to the folder of the analysis.json."""

    title: str
    file: str
    caption: str = ""


@dataclass(frozen=True)
class Document:
    """The result of a tool: its page, and the report's section about it."""

    title: str
    description: str = ""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def made_with(self) -> str:
        """The versions in one line."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def add_table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        caption: str = "",
    ) -> None:
        """Add a table; numbers are rounded to four significant digits, NaN and Inf left out."""
        cells = [[_cell(value) for value in row] for row in rows]
        self.tables.append(Table(title, list(columns), cells, caption))

    def add_figure(
        self, title: str, name: str, caption: str, drawn: matplotlib.figure.Figure, folder: Path
    ) -> None:
        """Add a figure, which is written to ``folder``/NAME.png."""
        from fst.lab.reporting.figures import save  # numbers need no matplotlib

        self.figures.append(Figure(title, save(drawn, folder, name), caption))

    def save(self, folder: Path) -> Path:
        """Write ``folder``/analysis.json, replacing it in one step."""
        path = folder / FILE_NAME
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(text + "\n", path)
        return path


def load_document(folder: Path) -> Document:
    """Read ``folder``/analysis.json, which `Document.save` has written.

    Raises:
        ValueError: it is another file of that name.
    """
    path = folder / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} was not written by `fst analyze` or `fst ablate`: {error}."
        ) from error


def _cell(value: object) -> Cell:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
