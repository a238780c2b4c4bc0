"""Training with mmengine: import this package and its datasets, models and hooks are registered."""

from fst.basics.extras import extra_named

with extra_named():
    from fst.engine.classifier import Classifier
    from fst.engine.data import (
        CIFAR10,
        ClutteredDigits,
        Digits,
        ImageFolder,
    )
    from fst.engine.hooks import (
        CrashSafeCheckpointHook,
        LossMonitorHook,
        RandomStateHook,
        SparsityHook,
    )
    from fst.engine.metrics import Accuracy
    from fst.engine.optim import MixedPrecisionOptimWrapper
    from fst.engine.preprocessor import ImagePreprocessor
    from fst.engine.runner import Runner

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
