"""The error of what is asked for at the wrong time or place."""

from __future__ import annotations


class UsageError(RuntimeError):
    """What is asked for cannot work here; the message says what does, and commands end in it."""
