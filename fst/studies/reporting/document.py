"""Tables and figures with what is needed to make them again: a folder with an analysis.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fst.basics.text import suggest
from fst.checkpoint import write_text_atomically

FILE_NAME = "analysis.json"
Cell = str | int | float | bool | None
Part = TypeVar("Part")


@dataclass(frozen=True)
class Table:
    """A table; cells are texts, numbers or None (an empty cell)."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure; ``file`` is an SVG, relative to the folder of the analysis.json."""

    title: str
    file: str
    caption: str = ""


@dataclass(frozen=True)
class Document:
    """What a tool found out: the report's section about it."""

    title: str
    description: str = ""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Write ``folder``/analysis.json, replacing it in one step."""
        path = folder / FILE_NAME
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(text + "\n", path)
        return path


def load_document(folder: Path) -> Document:
    """Read ``folder``/analysis.json.

    Raises:
        ValueError: it is no JSON of that format: an unknown or missing key, a row of another
            length than the columns, a figure whose file is missing or lies outside the folder.
    """
    path = folder / FILE_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    document = _build(Document, raw, str(path))
    tables = [_build(Table, t, f"{path}: tables[{i}]") for i, t in enumerate(document.tables)]
    figures = [_build(Figure, f, f"{path}: figures[{i}]") for i, f in enumerate(document.figures)]
    for i, table in enumerate(tables):
        for row in table.rows:
            if not isinstance(row, list) or len(row) != len(table.columns):
                raise ValueError(
                    f"{path}: tables[{i}]: row {row!r} must have {len(table.columns)} cells, one "
                    "for each column."
                )
    for i, figure in enumerate(figures):
        file = (folder / figure.file).resolve()
        if not file.is_relative_to(folder.resolve()) or file.suffix != ".svg":
            raise ValueError(f"{path}: figures[{i}].file={figure.file!r} must be an SVG beside it.")
        if not file.is_file():
            raise ValueError(f"{path}: figures[{i}].file={figure.file!r} does not exist.")
    versions = {str(name): str(value) for name, value in document.versions.items()}
    return Document(
        title=str(document.title),
        description=str(document.description),
        command=str(document.command),
        versions=versions,
        tables=tables,
        figures=figures,
        notes=[str(note) for note in document.notes],
    )


def _build(kind: type[Part], raw: Any, where: str) -> Part:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} must be an object with the keys {known}.")
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: {key!r} is no key.{suggest(key, known)}")
    try:
        return kind(**raw)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
