"""Training with mmengine: import this package and its datasets, models and hooks are registered."""

from fst.basics.extras import extra_named

with extra_named():
    from fst.training.engine.classifier import Classifier
    from fst.training.engine.data.cifar import CIFAR10
    from fst.training.engine.data.digits import ClutteredDigits, Digits
    from fst.training.engine.data.folder import ImageFolder
    from fst.training.engine.hooks.checkpoint import CrashSafeCheckpointHook
    from fst.training.engine.hooks.monitor import LossMonitorHook
    from fst.training.engine.hooks.random_state import RandomStateHook
    from fst.training.engine.hooks.sparsity import SparsityHook
    from fst.training.engine.metrics import Accuracy
    from fst.training.engine.optim import MixedPrecisionOptimWrapper
    from fst.training.engine.preprocessor import ImagePreprocessor
    from fst.training.engine.runner import Runner

__all__ = [
    "CIFAR10",
    "Accuracy",
    "Classifier",
    "ClutteredDigits",
    "CrashSafeCheckpointHook",
    "Digits",
    "ImageFolder",
    "ImagePreprocessor",
    "LossMonitorHook",
    "MixedPrecisionOptimWrapper",
    "RandomStateHook",
    "Runner",
    "SparsityHook",
]
