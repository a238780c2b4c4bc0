"""Hooks: sparsity, crash-safe checkpoints, losses, random states."""

from fst.engine.hooks.checkpoint import CrashSafeCheckpointHook
from fst.engine.hooks.monitor import LossMonitorHook
from fst.engine.hooks.random_state import RandomStateHook
from fst.engine.hooks.sparsity import SparsityHook

__all__ = [
    "CrashSafeCheckpointHook",
    "LossMonitorHook",
    "RandomStateHook",
    "SparsityHook",
]
