"""Tables and figures with what is needed to make them again: a folder with an analysis.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from fst.checkpoint import write_text_atomically

FILE_NAME = "analysis.json"
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
    """What a tool found out: the report's section about it."""

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
