"""Hooks: sparsity, averaged weights, crash-safe checkpoints, losses, random state, validation."""

from fst.engine.hooks.checkpoint import CrashSafeCheckpointHook
from fst.engine.hooks.ema import ModelEMAHook
from fst.engine.hooks.monitor import LossMonitorHook
from fst.engine.hooks.random_state import RandomStateHook
from fst.engine.hooks.sparsity import SparsityHook
from fst.engine.hooks.validation import ValidateOnResumeHook

__all__ = [
    "CrashSafeCheckpointHook",
    "LossMonitorHook",
    "ModelEMAHook",
    "RandomStateHook",
    "SparsityHook",
    "ValidateOnResumeHook",
]
