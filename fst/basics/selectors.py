"""Layers and weights by name or by type: what ``include`` and ``exclude`` mean everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

Selector = str | type[nn.Module]


def selected(
    argument: str,
    selectors: Selector | Iterable[Selector],
    named: Mapping[str, object],
    what: str,
    *,
    others: Mapping[str, object] | None = None,
) -> set[str]:
    """The names that any selector selects.

    Args:
        argument: its name, for errors.
        selectors: a glob pattern selects the names that it matches, and all names below one that
            it matches ("layer1" and "layer?" select "layer1.0.conv"); a type of modules selects
            what stands for such a module.
        named: name -> module, or what else stands for the name.
        what: what they name, for errors.
        others: where a selector that selects nothing of ``named`` looks next.

    Raises:
        TypeError: a selector is neither a string nor a type of modules.
        ValueError: a selector selects nothing.
    """
    if isinstance(selectors, str) or not isinstance(selectors, Iterable):
        selectors = [selectors]
    found: set[str] = set()
    for selector in selectors:
        if not isinstance(selector, str) and not _is_kind(selector):
            raise TypeError(
                f"{argument}={selector!r}: a selector is a name pattern or a module type."
            )
        chosen = _selected(selector, named) or _selected(selector, others or {})
        if not chosen:
            known = ", ".join({**named, **(others or {})}) or "none"
            raise ValueError(f"{argument}={selector!r} matches no {what}. There are: {known}.")
        found |= chosen
    return found


def _is_kind(selector: object) -> bool:
    return isinstance(selector, type) and issubclass(selector, nn.Module)


def _selected(selector: Selector, named: Mapping[str, object]) -> set[str]:
    if isinstance(selector, str):
        return {
            name
            for name in named
            if fnmatchcase(name, selector) or fnmatchcase(name, f"{selector}.*")
        }
    return {name for name, value in named.items() if isinstance(value, selector)}
