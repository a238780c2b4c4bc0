"""Wording of error messages about names from long lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], count: int = 3) -> str:
    """The end of an error message about an unknown name: the nearest known ones only."""
    near = difflib.get_close_matches(str(name), list(known), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
