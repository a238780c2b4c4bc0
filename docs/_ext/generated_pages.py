"""Writes the pages that say what the package says: strategies, recipes, API reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api_pages
import recipe_pages
import strategy_pages
from sphinx.application import Sphinx

FOLDERS = ("api", "strategies", "recipes")  # under docs/, in .gitignore


def _write(app: Sphinx) -> None:
    """Write what has changed and remove what no longer is."""
    source = Path(app.srcdir)
    pages = {**strategy_pages.pages(), **recipe_pages.pages(), **api_pages.pages()}
    for folder in FOLDERS:
        for file in (source / folder).glob("*.md"):
            if file.relative_to(source).as_posix() not in pages:
                file.unlink()
    for name, text in pages.items():
        file = source / name
        file.parent.mkdir(exist_ok=True)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
