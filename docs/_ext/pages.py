"""Pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def page(*parts: str) -> str:
    """Paragraphs, tables and fences with an empty line between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )


def fence(language: str, text: str) -> str:
    """A block of code, or a directive."""
    return f"```{language}\n{text}\n```"


def toctree(entries: Iterable[str]) -> str:
    """A table of contents that the sidebar alone shows."""
    return fence("{toctree}", ":hidden:\n\n" + "\n".join(entries))


def linked(docstring: str) -> str:
    """A docstring as Markdown of a page one folder below docs/: what it names becomes links."""
    text = re.sub(r"\bdocs/(\w+)\.md", r"[docs/\1.md](../\1.md)", docstring)
    return re.sub(r"(?<![/\w])((?:github\.com|bitbucket\.org)/[\w./-]*\w)", r"<https://\1>", text)
