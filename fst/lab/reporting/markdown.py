"""A document as one Markdown page, and beside its JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fst.basics.text import table
from fst.cli.environment import machine, versions
from fst.files.checkpoint import write_text_atomically
from fst.lab.reporting.document import DIGITS, Cell, Document


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


def publish(document: Document, folder: Path, command: str) -> list[Path]:
    """Write an analysis as analysis.md and .json beside its figures; return all the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made_with = {**versions(), "machine": machine()}
    document = replace(document, command=command, versions=made_with)
    page = folder / "analysis.md"
    write_text_atomically(markdown(document), page)
    return [*(folder / figure.file for figure in document.figures), page, document.save(folder)]
