"""Tables of the Markdown pages that programs write."""

from pathlib import Path


def tables_of(page: Path) -> list[list[dict[str, object]]]:
    """Each table of the page, its rows by column; numbers as floats, empty cells as None."""
    tables, lines = [], page.read_text().splitlines()
    for index, line in enumerate(lines):
        if line.startswith("| ---"):
            columns = cells_of(lines[index - 1])
            rows = lines[index + 1 : lines.index("", index)]
            found = [map(_value, cells_of(row)) for row in rows]
            tables.append([dict(zip(columns, row, strict=True)) for row in found])
    return tables


def cells_of(line: str) -> list[str]:
    """The texts of a row."""
    cells = line.replace("\\|", "\0").split("|")[1:-1]
    return [cell.strip().replace("\0", "|") for cell in cells]


def _value(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text or None
