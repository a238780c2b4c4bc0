"""Documents as one HTML page that needs nothing else: no network, no other file, no script."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fst.lab.reporting.document import Document, Figure
from fst.lab.reporting.markdown import show

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page(
    title: str, sections: Sequence[tuple[Document, Path, str]], made: Mapping[str, str]
) -> str:
    """The page: how it was made, a line of contents for each section, and the sections.

    Args:
        title: of the page.
        sections: of each document the folder of its figures, and how the contents name it.
        made: what is said about the page itself: command, date, versions.

    Raises:
        FileNotFoundError: a figure's file is missing.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(shown=show, coded=_coded)
    shown = [
        (replace(d, figures=[_embedded(f, folder) for f in d.figures]), name)
        for d, folder, name in sections
    ]
    return environment.get_template(TEMPLATE.name).render(title=title, made=made, sections=shown)


def _embedded(figure: Figure, folder: Path) -> Figure:
    """The figure with the bytes of its PNG in place of the file's name."""
    content = (folder / figure.file).read_bytes()
    return replace(figure, file=f"data:image/png;base64,{base64.b64encode(content).decode()}")


def _coded(text: str) -> Markup:
    """Escaped, with what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
