"""Numbers in the tables of three pages are those of the results pages that they name.

Below a table a paragraph names the sources of its measured columns:

    Sources: *column*: [words](page.md#section "column there"), [words](...); *column*: ...

Each number of such a column is that of the row of the same name in the first of these sections that
has it, rounded. `"column there | row"` names the row too. No other column has a decimal number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "choose.md", ROOT / "docs" / "index.md"]
TABLE = re.compile(r"((?:^\|.*\n)+)(?:\n(Sources: (?:.+\n)+))?", re.MULTILINE)
LINK = re.compile(r'\[[^\]]*\]\(([^)#\s]+)#([^)\s]+) "([^"]+)"\)')
OF_COLUMN = re.compile(rf"\*([^*]+)\*: ((?:{LINK.pattern}(?:, )?)+)")
NUMBER = re.compile(r"[−+-]?\d+(?:\.\d+)?")

Table = list[list[str]]
Source = tuple[str, str, str]  # page, section, column


def tables(text: str) -> Iterator[tuple[Table, dict[str, list[Source]]]]:
    """Rows of cells without code marks and emphasis, the heading's first; sources by column."""
    for block, below in TABLE.findall(text):
        rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
        cells = [[re.sub(r"[`*]", "", cell).strip() for cell in row] for row in rows]
        named = OF_COLUMN.findall(" ".join(below.split()))
        yield [cells[0], *cells[2:]], {column[0]: LINK.findall(column[1]) for column in named}


def section(text: str, anchor: str) -> str:
    """What stands below the heading of that anchor, up to the next one that is not below it."""
    level, found = 0, []
    for line in text.splitlines(keepends=True):
        heading = re.match(r"(#+) (.+)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-") == anchor:
            level = len(heading[1])
        elif level:
            found.append(line)
    return "".join(found)


def measured(page: Path, sources: list[Source], row: str) -> str:
    """The one cell of a results page; row names may go on after a colon."""
    for name, anchor, title in sources:
        column, _, of_row = title.partition(" | ")
        wanted = of_row or row
        cells = [
            line[table[0].index(column)]
            for table, _ in tables(section((page.parent / name).read_text("utf-8"), anchor))
            if column in table[0]
            for line in table[1:]
            if line[0] == wanted or line[0].startswith(f"{wanted}:")
        ]
        if len(cells) == 1:
            return cells[0]
    raise LookupError(f"{page.name}: no cell, or several, of {row!r} in {sources}")


def numbers(cell: str) -> list[str]:
    return [found.replace("−", "-").lstrip("+") for found in NUMBER.findall(cell)]


def agrees(shown: str, source: str) -> bool:
    """The shown numbers are the source's first ones, rounded."""
    pairs = list(zip(numbers(shown), numbers(source), strict=False))
    return len(pairs) == len(numbers(shown)) and all(
        Decimal(ours) == Decimal(theirs).quantize(Decimal(ours), rounding=ROUND_HALF_UP)
        for ours, theirs in pairs
    )


def check(page: Path, text: str) -> tuple[list[str], list[str]]:
    """Cells that agree with their source, and what is wrong."""
    right, wrong = [], []
    for table, sources in tables(text):
        wrong += [f"no column {name}" for name in sources if name not in table[0]]
        for row in table[1:]:
            for column, cell in zip(table[0][1:], row[1:], strict=True):
                if column not in sources:
                    wrong += [f"{row[0]}: {cell}"] * bool(re.search(r"\d\.\d", cell))
                elif numbers(cell):
                    source = measured(page, sources[column], row[0])
                    place = right if agrees(cell, source) else wrong
                    place.append(f"{row[0]}, {column}: {cell!r}, measured {source!r}")
    return right, wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_is_that_of_its_source(page: Path) -> None:
    right, wrong = check(page, page.read_text(encoding="utf-8"))
    assert right and not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_changed_number_is_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cells = re.findall(r"\| ([−+]?\d+(?:\.\d+)?(?: ± \d+\.\d+)?) (?=\|)", text)
    assert len(cells) > 5
    for cell in cells:
        changed = cell[:-1] + str((int(cell[-1]) + 1) % 10)
        _, wrong = check(page, text.replace(f"| {cell} ", f"| {changed} ", 1))
        assert wrong, f"{cell} became {changed}"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/results").glob("[!R]*.md")), ids=lambda p: p.stem
)
def test_a_results_page_begins_with_a_question_of_the_index_and_its_answer(page: Path) -> None:
    index = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    start = re.match(r"# .+\n\n\*\*(.+?\?).*\*\*.* \S+", page.read_text(encoding="utf-8"))
    assert start and f"| {start[1]} |" in index


def test_a_number_without_a_source_is_found() -> None:
    assert check(PAGES[0], "| a | speed |\n|---|---|\n| `fst` | 1.31 |\n")[1] == ["fst: 1.31"]
