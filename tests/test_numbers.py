"""Numbers in the tables of three pages are those of the results pages that they name.

A column whose heading is a link with a title is measured: `[shown](page.md#section "column")`. Each
of its cells repeats the cell of that column in the row of the same name, rounded. No other column
has a decimal number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "choose.md", ROOT / "docs" / "index.md"]
HEADING = re.compile(r'\[[^\]]*\]\(([^)#\s]+)#([^)\s]+) "([^"]+)"\)')
NUMBER = re.compile(r"[−+-]?\d+(?:\.\d+)?")

Table = list[list[str]]


def tables(text: str) -> Iterator[Table]:
    """Rows of cells without code marks and emphasis; the heading's row is the first."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
        yield [[re.sub(r"[`*]", "", cell).strip() for cell in row] for row in (rows[0], *rows[2:])]


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


def measured(page: Path, anchor: str, column: str, row: str) -> str:
    """The one cell of a results page; row names may go on after a colon."""
    cells = [
        line[table[0].index(column)]
        for table in tables(section(page.read_text(encoding="utf-8"), anchor))
        if column in table[0]
        for line in table[1:]
        if line[0] == row or line[0].startswith(f"{row}:")
    ]
    if len(cells) != 1:
        raise LookupError(f"{page.name}#{anchor}: {len(cells)} cells of {row!r} in {column!r}")
    return cells[0]


def numbers(cell: str) -> list[str]:
    return [found.replace("−", "-").lstrip("+") for found in NUMBER.findall(cell)]


def agrees(shown: str, source: str) -> bool:
    """The shown numbers are the source's first ones, rounded; words are the same words."""
    if not numbers(shown):
        return shown == source
    pairs = list(zip(numbers(shown), numbers(source), strict=False))
    return len(pairs) == len(numbers(shown)) and all(
        Decimal(ours) == Decimal(theirs).quantize(Decimal(ours), rounding=ROUND_HALF_UP)
        for ours, theirs in pairs
    )


def check(page: Path, text: str) -> tuple[list[str], list[str]]:
    """Cells that agree with their source, and what is wrong."""
    right, wrong = [], []
    for table in tables(text):
        for column, heading in enumerate(table[0][1:], start=1):
            link = HEADING.fullmatch(heading)
            for row in table[1:]:
                if link is None:
                    wrong += [f"{row[0]}: {row[column]}"] * bool(re.search(r"\d\.\d", row[column]))
                if link is None or not row[column]:
                    continue
                source = measured(page.parent / link[1], link[2], link[3], row[0])
                place = right if agrees(row[column], source) else wrong
                place.append(f"{row[0]}, {link[3]}: {row[column]!r}, measured {source!r}")
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


def test_a_number_without_a_source_is_found() -> None:
    assert check(PAGES[0], "| a | speed |\n|---|---|\n| `fst` | 1.31 |\n")[1] == ["fst: 1.31"]
