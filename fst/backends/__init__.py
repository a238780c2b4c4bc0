"""Which implementation computes an operation behind `fst.sparse_conv2d`, and why.

A `Backend` is one implementation; `choose` picks one for the operands at hand. The semantics never
depend on it.
"""

from fst.backends.choice import choose, compute
from fst.backends.record import Decision, Record
from fst.backends.registry import (
    NO_GAIN,
    OPERATIONS,
    Backend,
    backend,
    backends,
    describe,
    force,
    prefer,
    register_backend,
    register_operation,
)
from fst.backends.store import forget as forget_decisions

__all__ = [
    "NO_GAIN",
    "OPERATIONS",
    "Backend",
    "Decision",
    "Record",
    "backend",
    "backends",
    "choose",
    "compute",
    "describe",
    "force",
    "forget_decisions",
    "prefer",
    "register_backend",
    "register_operation",
]
