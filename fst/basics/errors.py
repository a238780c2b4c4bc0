"""The error of what is asked for at the wrong time or place."""

from __future__ import annotations


class UsageError(RuntimeError):
    """A request that cannot work here; the message says what can, and a command ends with it."""
