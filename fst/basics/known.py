"""A bounded cache of what is made once for each size."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(known: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Store ``value``. A full cache, of ``most`` values, is emptied first."""
    if len(known) >= most:
        known.clear()
    known[key] = value
