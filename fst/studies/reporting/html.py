"""Documents as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from fst.studies.reporting.assets import SCRIPT, STYLE
from fst.studies.reporting.document import Cell, Document, Figure, Table
from fst.studies.reporting.markdown import show
from fst.studies.reporting.svg import inline

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
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        _facts(made),
        "</header>",
        _contents([document for document, _ in sections]),
        "<main>",
    ]
    for number, (document, folder) in enumerate(sections, 1):
        parts += _section(number, document, folder)
    parts += ["</main>", f"<script>{SCRIPT}</script>", "</body></html>"]
    return "\n".join(part for part in parts if part) + "\n"


def _facts(facts: Mapping[str, str]) -> str:
    entries = "".join(
        f"<dt>{escape(name)}</dt><dd>{_code(name, value)}</dd>"
        for name, value in facts.items()
        if value
    )
    return f'<dl class="meta">{entries}</dl>' if entries else ""


def _code(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name == "Command" else escape(value)


def _contents(documents: Sequence[Document]) -> str:
    items = []
    for number, document in enumerate(documents, 1):
        named = [(f"s{number}t{i}", t.title) for i, t in enumerate(document.tables, 1)]
        named += [(f"s{number}f{i}", f.title) for i, f in enumerate(document.figures, 1)]
        inner = "".join(f'<li><a href="#{key}">{escape(text)}</a></li>' for key, text in named)
        inner = f"<ol>{inner}</ol>" if inner else ""
        items.append(f'<li><a href="#s{number}">{escape(document.title)}</a>{inner}</li>')
    return f'<nav aria-label="Contents"><h3>Contents</h3><ol>{"".join(items)}</ol></nav>'


def _section(number: int, document: Document, folder: Path) -> Iterator[str]:
    key = f"s{number}"
    yield f'<section aria-labelledby="{key}"><h2 id="{key}">{escape(document.title)}</h2>'
    for paragraph in document.description.split("\n\n"):
        yield f"<p>{escape(paragraph)}</p>" if paragraph.strip() else ""
    for i, table in enumerate(document.tables, 1):
        yield _table(table, f"{key}t{i}")
    if document.figures:
        yield '<div class="figures">'
        for i, figure in enumerate(document.figures, 1):
            yield _figure(figure, folder, f"{key}f{i}")
        yield "</div>"
    if document.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in document.notes)
        yield f'<div class="notes"><h3>Notes</h3><ul>{notes}</ul></div>'
    versions = ", ".join(f"{name} {value}" for name, value in document.versions.items())
    yield _facts({"Command": document.command, "Made with": versions})
    yield "</section>"


def _table(table: Table, key: str) -> str:
    kinds = [_kind(row[i] for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = []
    for row in table.rows:
        first, *others = zip(row, kinds, strict=True)
        cells = f'<th scope="row">{escape(show(first[0]))}</th>'
        cells += "".join(f"<td{kind}>{escape(show(cell))}</td>" for cell, kind in others)
        rows.append(f"<tr>{cells}</tr>")
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return (
        f'<h3 id="{key}">{escape(table.title)}</h3>'
        f'<div class="box" tabindex="0" role="region" aria-labelledby="{key}">'
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _kind(cells: Iterator[Cell]) -> str:
    """How a column is set: numbers at the right, words at the left, long texts wrapped."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    if any(len(text) > LONG for text in texts):
        return ' class="text"'
    return ' class="word"' if any(text[:1].isalpha() for text in texts) else ""


def _figure(figure: Figure, folder: Path, key: str) -> str:
    drawing = inline(folder / figure.file, f"{key}-", figure.title, figure.caption)
    return (
        f'<figure id="{key}"><div class="box" tabindex="0" role="region" '
        f'aria-label="{escape(figure.title)}">{drawing}</div>'
        f"<figcaption><strong>{escape(figure.title)}.</strong> {escape(figure.caption)}"
        "</figcaption></figure>"
    )
