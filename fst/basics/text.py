"""Wording shared by error messages and reports: nearest names, counts and plain-text tables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def suggest(name: object, known: Iterable[str]) -> str:
    """End of an error message about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    near = [known for known in names if sorted(known) == sorted(str(name))]
    lower = {known.lower(): known for known in names}
    near += [lower[n] for n in difflib.get_close_matches(str(name).lower(), lower, 1, cutoff=0.5)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known ones only."""
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def counted_as(number: int, one: str, several: str) -> str:
    """The number and the words for it: "1 weight is", "2 weights are"."""
    return f"{number} {one if number == 1 else several}"


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, markdown: bool = False
) -> str:
    """Aligned table with a rule below the header, in plain text or Markdown."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    least = 3 if markdown else 0
    widths = [max(least, *(len(row[i]) for row in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    lines = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in cells]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)
