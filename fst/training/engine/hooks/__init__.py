"""Hooks: sparsity, crash-safe checkpoints, losses, random states."""

from fst.training.engine.hooks.checkpoint import CrashSafeCheckpointHook
from fst.training.engine.hooks.monitor import LossMonitorHook
from fst.training.engine.hooks.random_state import RandomStateHook
from fst.training.engine.hooks.sparsity import SparsityHook

__all__ = [
    "CrashSafeCheckpointHook",
    "LossMonitorHook",
    "RandomStateHook",
    "SparsityHook",
]
