"""A page of tables and figures in Markdown, with what is needed to make it again."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.backends.cpu import get_cpu_capability

from fst.basics.arguments import add_traceback, user_errors
from fst.basics.text import table
from fst.cli.environment import machine, versions
from fst.files.checkpoint import write_text_atomically

if TYPE_CHECKING:
    import matplotlib.figure

DIGITS = 4  # significant ones, of floats


@dataclass(frozen=True)
class Table:
    """A table; None and NaN are empty cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure; ``file`` is a PNG beside the page."""

    title: str
    file: str
    caption: str = ""


@dataclass(frozen=True)
class Document:
    """A page; ``command`` makes it again, ``made_with`` names the versions and the machine."""

    title: str
    description: str = ""
    command: str = ""
    made_with: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        caption: str = "",
    ) -> None:
        """Add a table."""
        self.tables.append(Table(title, columns, rows, caption))

    def add_figure(
        self, title: str, name: str, caption: str, drawn: matplotlib.figure.Figure, folder: Path
    ) -> None:
        """Add a figure, which is written to ``folder``/NAME.png."""
        from fst.lab.figures import save  # numbers need no matplotlib

        self.figures.append(Figure(title, save(drawn, folder, name), caption))


def markdown(document: Document) -> str:
    """All of the document."""
    lines = [f"# {document.title}", ""]
    if document.description:
        lines += [document.description, ""]
    for part in document.tables:
        columns, *rows = [[_cell(cell) for cell in row] for row in (part.columns, *part.rows)]
        lines += [f"## {part.title}", "", table(columns, rows, markdown=True), ""]
        lines += [part.caption, ""] if part.caption else []
    for figure in document.figures:
        lines += [f"## {figure.title}", "", f"![{figure.title}]({figure.file})", ""]
        lines += [figure.caption, ""] if figure.caption else []
    if document.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in document.notes), ""]
    lines += ["## How it was made", "", f"    {document.command}", ""]
    if document.made_with:
        lines += [f"{document.made_with}.", ""]
    return "\n".join(lines)


def command_of(command: str, line: argparse.Namespace) -> str:
    """The line that calls `fst` ``command`` again, from its parsed line."""
    return shlex.join(["fst", command, *line.words])


def made_with() -> str:
    """The versions and the machine, in one line."""
    found = {**versions(), "machine": machine(), "instruction set": get_cpu_capability()}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _cell(value: object) -> str:
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    text = f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def make_page(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Document | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Call ``run`` with a script's arguments; write what it returns to analysis.md in --out."""
    words = sys.argv if argv is None else argv
    default = Path("work_dirs/analysis") / Path(sys.argv[0]).stem
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder to write (default: {default})"
    )
    add_traceback(parser)
    options = parser.parse_args(argv)
    with user_errors(options):
        document = run(options)
        if document is not None:
            command = shlex.join(["python", *words])
            page = options.out / "analysis.md"
            page.parent.mkdir(parents=True, exist_ok=True)
            text = markdown(replace(document, command=command, made_with=made_with()))
            write_text_atomically(text, page)
            for file in (*(figure.file for figure in document.figures), page.name):
                print(f"written: {options.out / file}")
    return 0
