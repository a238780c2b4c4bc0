"""What is made once for each size, and kept."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(known: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Keep ``value``; beyond ``most`` the others are forgotten: sizes may vary without end."""
    if len(known) >= most:
        known.clear()
    known[key] = value
