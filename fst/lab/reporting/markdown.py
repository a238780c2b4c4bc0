"""A document as one Markdown page."""

from __future__ import annotations

from fst.basics.text import table
from fst.lab.reporting.document import Cell, Document

DIGITS = 4  # significant ones, of numbers that come as floats


def show(cell: Cell) -> str:
    """A table's cell as text."""
    if cell is None:
        return ""
    return f"{cell:.{DIGITS}g}" if isinstance(cell, float) else str(cell)


def markdown(document: Document) -> str:
    """All of the document."""
    lines = [f"# {document.title}", ""]
    if document.description:
        lines += [document.description, ""]
    for part in document.tables:
        rows = [[_cell(cell) for cell in row] for row in part.rows]
        columns = [_cell(column) for column in part.columns]
        lines += [f"## {part.title}", "", table(columns, rows, markdown=True), ""]
        lines += [part.caption, ""] if part.caption else []
    for figure in document.figures:
        lines += [f"## {figure.title}", "", f"![{figure.title}]({figure.file})", ""]
        lines += [figure.caption, ""] if figure.caption else []
    if document.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in document.notes), ""]
    lines += ["## How it was made", "", f"    {document.command}", ""]
    lines += [f"{document.made_with}.", ""] if document.made_with else []
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    return show(cell).replace("|", "\\|")
