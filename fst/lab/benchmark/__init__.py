"""Side-by-side timing of convolutions, GEMM by GEMM, and of whole training steps.

Everything that is compared is timed in one run, in turns, in both orders; a result is a ratio of
medians. Used by `fst bench`.
"""

from fst.backends.timing import Function, Timing, compare, geometric_mean, sample
from fst.lab.benchmark.layers import (
    PLAIN,
    LayerShape,
    LayerTimes,
    layer_shapes,
    time_layer,
)
from fst.lab.benchmark.steps import Candidates, StepTimes, candidates, time_steps
from fst.lab.model import Training

__all__ = [
    "PLAIN",
    "Candidates",
    "Function",
    "LayerShape",
    "LayerTimes",
    "StepTimes",
    "Timing",
    "Training",
    "compare",
    "candidates",
    "geometric_mean",
    "layer_shapes",
    "sample",
    "time_layer",
    "time_steps",
]
