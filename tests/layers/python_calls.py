"""Python calls of converted layers in a training step: `python -m tests.layers.python_calls`.

Prints, as JSON, calls of a layer in one step beyond those of torch.nn.Conv2d, by row and strategy:
``small``: 20 layers of 16 channels on 4x4 maps, whose weights' and maps' zeros gain nothing.
``wide``: 4 layers of 64 channels on 14x14 maps, whose products are accelerated.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fst

STRATEGIES = ("dense", "srste", "fst_w", "sdgp", "fst", "sampled", "fst_sampled")
ROWS = {"small": (20, 16, 4, 2), "wide": (4, 64, 14, 16)}  # layers, channels, size, batch
STEPS = 5  # all is chosen and known after two


def counted_by(module: str) -> dict[str, Any]:
    """What a module of this folder prints, in a process without other layers; nothing is timed."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.layers.{module}"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "FST_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def calls_of_a_step(model: nn.Module, images: Tensor) -> int:
    """The fewest of some steps: a garbage collection may call finalizers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts = []

    def count(_frame: object, event: str, _argument: object) -> None:
        counts[-1] += event == "call"

    for _ in range(STEPS):
        counts.append(0)
        sys.setprofile(count)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        sys.setprofile(None)
    return min(counts)


def measure(layers: int, channels: int, size: int, batch: int) -> dict[str, float]:
    """Calls of a layer, by strategy."""
    images = torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)

    def calls(strategy: str | None) -> int:
        model = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(layers))
        ).to(memory_format=torch.channels_last)
        if strategy is not None:
            fst.convert(model, strategy)
        return calls_of_a_step(model, images)

    plain, found = calls(None), {}
    for strategy in STRATEGIES:
        found[strategy] = (calls(strategy) - plain) / layers
        gc.collect()  # an optimizer's step looks at all living layers
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({row: measure(*sizes) for row, sizes in ROWS.items()}))
