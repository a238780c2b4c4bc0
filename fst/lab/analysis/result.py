"""What an analysis hands over, and how it is written: analysis.json, a Markdown page, PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fst.checkpoint import write_text_atomically
from fst.environment import machine, versions
from fst.lab.reporting.document import Cell, Document, Figure, Table
from fst.lab.reporting.markdown import DIGITS, markdown

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True)
class Plot:
    """A figure that is still matplotlib's; `name` becomes its files' name."""

    title: str
    name: str
    caption: str
    figure: matplotlib.figure.Figure


@dataclass
class Result:
    """Tables and figures of one analysis."""

    title: str
    description: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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

    def save(self, folder: Path, command: str) -> list[Path]:
        """Write everything into ``folder`` and return the files."""
        from fst.lab.reporting.figures import save  # numbers need no matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        written, figures = [], []
        for plot in self.plots:
            figures.append(Figure(plot.title, save(plot.figure, folder, plot.name), plot.caption))
            written.append(folder / figures[-1].file)
        document = Document(
            title=self.title,
            description=self.description,
            command=command,
            versions={**versions(), "machine": machine()},
            tables=self.tables,
            figures=figures,
            notes=self.notes,
        )
        page = folder / "analysis.md"
        write_text_atomically(markdown(document), page)
        return [*written, page, document.save(folder)]


def _cell(value: object) -> Cell:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{DIGITS}g}")
    return value if isinstance(value, str | int | bool | None) else str(value)
