"""Calls and launches of a step as on a GPU: `python -m tests.layers.kernel_calls`.

Triton's kernels prune, whose launches are counted and not made, and the library multiplies. Prints,
as JSON, what a layer's step takes by strategy: Python calls beyond those of torch.nn.Conv2d (those
of Triton itself are not among them), and launches.
"""

from __future__ import annotations

import gc
import json
from unittest.mock import patch

import torch
from torch import nn

import fst
from fst.backends import backend, sources
from fst.ops import prune
from tests.layers.python_calls import STEPS, calls_of_a_step

STRATEGIES = ("srste", "fst_w", "sdgp", "sdgp,rule=magnitude", "fst")
LAYERS, CHANNELS = 20, 16
KERNELS = dict.fromkeys(("prune_weight", "prune_grad_output"), "triton")
DENSE = dict.fromkeys(("output", "grad_input"), "dense")


class Kernel:
    """Counts its launches."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        Kernel.launches += 1


def network(strategy: str | None) -> nn.Module:
    """Small layers, converted unless ``strategy`` is None."""
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    if strategy is not None:
        fst.convert(model, strategy)
    return model


def measure() -> dict[str, tuple[float, float]]:
    """Calls and launches of a layer, by strategy."""
    images = torch.randn(2, CHANNELS, 4, 4).contiguous(memory_format=torch.channels_last)
    plain, found = calls_of_a_step(network(None), images), {}
    for strategy in STRATEGIES:
        gc.collect()  # an optimizer's step looks at all living layers
        Kernel.launches = 0
        multiply = {**DENSE, "grad_weight": "strided" if strategy == "fst" else "dense"}
        with fst.backends.force(**KERNELS, **multiply):
            calls = calls_of_a_step(network(strategy), images) - plain
        found[strategy] = calls / LAYERS, Kernel.launches / LAYERS / STEPS
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    pruning, gradient = sources.load("prune_weight"), sources.load("prune_gradient")
    with (
        patch.object(sources, "triton_missing", str),
        patch.object(type(backend("prune_weight", "triton")), "unavailable", lambda self: ""),
        patch.object(prune, "_kernel_adds", lambda *operands: False),  # it is for CPUs
        patch.multiple(pruning, _pair_kernel=Kernel(), _run_kernel=Kernel()),
        patch.multiple(
            gradient, _prune_kernel=Kernel(), _scale_kernel=Kernel(), _sums_kernel=Kernel()
        ),
    ):
        print(json.dumps(measure()))
