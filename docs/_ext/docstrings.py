"""Read docstrings: names in backticks become links where there is something to link to."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def _plain(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.TextElement | None:
    """`text` that names nothing stays code; only roles and type hints must lead somewhere."""
    return content if node["reftype"] == "obj" else None


def _skip_fields_of_tuples(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: object
) -> bool | None:
    """A field of a NamedTuple is described in its class."""
    return True if type(value).__name__ == "_tuplegetter" else None


def _readable_factories(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    """A field of a dataclass that is made anew has no value that Python could parse."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def _prepare(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Before napoleon reads them: no prose before a colon is a type, and |x| is a magnitude."""
    for number, line in enumerate(lines):
        line = re.sub(r"(``.*?``)|\|", lambda found: found[1] or r"\|", line)
        follows = lines[number - 1].strip() if number else what
        if follows in ("Returns:", "Yields:", "attribute", "property"):
            line = re.sub(r"^(\s*)", r"\1: ", line)
        lines[number] = line


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", _plain)
    app.connect("autodoc-skip-member", _skip_fields_of_tuples)
    app.connect("autodoc-process-signature", _readable_factories)
    app.connect("autodoc-process-docstring", _prepare, priority=400)
    return {"parallel_read_safe": True}
