"""Which implementation computes an operation behind `fst.sparse_conv2d`, and why.

The semantics never depend on it. A backend that is ``unverified`` has not yet run on the device it
is made for; it runs only where it is asked for by `force`.
"""

from fst.backends.autotune import Decision, LayerKey, Question, choose, decisions, forget_decisions
from fst.backends.registry import (
    OPERATIONS,
    Backend,
    backend,
    backends,
    describe,
    force,
    forced,
    prefer,
    register_backend,
    register_operation,
)

__all__ = [
    "OPERATIONS",
    "Backend",
    "Decision",
    "LayerKey",
    "Question",
    "backend",
    "backends",
    "choose",
    "decisions",
    "describe",
    "force",
    "forced",
    "forget_decisions",
    "prefer",
    "register_backend",
    "register_operation",
]
