"""Documents as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fst.studies.reporting.document import Cell, Document, Table
from fst.studies.reporting.markdown import show
from fst.studies.reporting.svg import inline

FOLDER = Path(__file__).parent / "page"  # the template, its style sheet and its script
TEMPLATE = "page.html.jinja"
# a page that is opened somewhere else could still not load or send anything
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LONG = 24  # characters from which on a cell is text that may wrap


def page(title: str, sections: Sequence[tuple[Document, Path]], made: Mapping[str, str]) -> str:
    """The page: a head that says how it was made, a table of contents, a section per document.

    Args:
        title: of the page.
        sections: documents, each with the folder that its figures lie in.
        made: what is said about the page itself: command, date, versions.

    Raises:
        ValueError: a figure is no SVG.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        policy=Markup(POLICY),
        made=_said(made),
        sections=[
            _section(f"s{number}", document, folder)
            for number, (document, folder) in enumerate(sections, 1)
        ],
    )


def _section(key: str, document: Document, folder: Path) -> dict[str, Any]:
    versions = ", ".join(f"{name} {value}" for name, value in document.versions.items())
    return {
        "key": key,
        "title": document.title,
        "paragraphs": [text for text in document.description.split("\n\n") if text.strip()],
        "tables": [_table(f"{key}t{i}", table) for i, table in enumerate(document.tables, 1)],
        "figures": [
            {
                "key": f"{key}f{i}",
                "title": figure.title,
                "caption": figure.caption,
                "drawing": Markup(
                    inline(folder / figure.file, f"{key}f{i}-", figure.title, figure.caption)
                ),
            }
            for i, figure in enumerate(document.figures, 1)
        ],
        "notes": document.notes,
        "facts": _said({"Command": document.command, "Made with": versions}),
    }


def _said(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if value}


def _table(key: str, table: Table) -> dict[str, Any]:
    kinds = [_kind(row[i] for row in table.rows) for i in range(len(table.columns))]
    return {
        "key": key,
        "title": table.title,
        "caption": table.caption,
        "columns": list(zip(table.columns, kinds, strict=True)),
        "rows": [
            [(show(cell), kind) for cell, kind in zip(row, kinds, strict=True)]
            for row in table.rows
        ],
    }


def _kind(cells: Iterable[Cell]) -> str:
    """A column's class: numbers at the right (none), words at the left, long texts wrapped."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    if any(len(text) > LONG for text in texts):
        return "text"
    return "word" if any(text[:1].isalpha() for text in texts) else ""
