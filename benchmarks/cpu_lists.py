"""Gradients from lists of positions by the C++ kernels, against torch's dense gradients on a CPU.

    python benchmarks/cpu_lists.py --batch 16
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/cpu_lists.py --batch 16

Times are medians of rounds in which all functions take turns. "all" is the dense gradient by the
C++ kernel: what the kernel gains is not a gain of leaving positions out. The times of weight
gradients of 0.5 and 0.25 of the positions hold their choice; the input gradient of 0.5 takes the
list that is there. Ratios are torch's time / this time, and geometric means of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fst.backends.sources import cpp_library
from fst.basics.machine import processor
from fst.basics.text import table
from fst.ops import cpp

LAST = torch.channels_last


class Layer(NamedTuple):
    """A convolution of square maps."""

    inside: int
    out: int
    size: int
    kernel: int = 3
    stride: int = 1

    def __str__(self) -> str:
        kind = f"{self.kernel}x{self.kernel}" + (f"/{self.stride}" if self.stride > 1 else "")
        return f"{self.inside}->{self.out} {self.size}x{self.size} {kind}"


SETS = {
    "resnet18": [
        Layer(64, 64, 56),
        Layer(64, 128, 56, stride=2),
        Layer(128, 128, 28),
        Layer(128, 256, 28, stride=2),
        Layer(256, 256, 14),
        Layer(256, 512, 14, stride=2),
        Layer(512, 512, 7),
    ],
    "resnet50": [
        Layer(64, 64, 56, 1),
        Layer(64, 256, 56, 1),
        Layer(256, 64, 56, 1),
        Layer(256, 512, 56, 1, 2),
        Layer(512, 128, 28, 1),
        Layer(1024, 256, 14, 1),
        Layer(512, 2048, 7, 1),
    ],
    "vit": [Layer(384, 1152, 1, 1), Layer(384, 384, 1, 1), Layer(384, 1536, 1, 1)]
    + [Layer(1536, 384, 1, 1)],
}
TOKENS = 197  # of an image, where the layers are linear
COLUMNS = ("torch dW", "all", "0.5", "0.25", "torch dX", "all", "0.5")


def functions(layer: Layer, batch: int, memory: torch.memory_format) -> list[Callable[[], Tensor]]:
    """Torch's dW, the list of all, 0.5, 0.25; torch's dX, the list of all, 0.5."""
    padding = layer.kernel // 2
    if layer.size == 1:
        batch *= TOKENS
    size = (layer.size + 2 * padding - layer.kernel) // layer.stride + 1
    x = torch.randn(batch, layer.inside, layer.size, layer.size).contiguous(memory_format=memory)
    dy = torch.randn(batch, layer.out, size, size) * torch.randn(batch, 1, size, size).exp()
    dy = dy.contiguous(memory_format=memory)
    weight = torch.randn(layer.out, layer.inside, layer.kernel, layer.kernel)
    weight = weight.contiguous(memory_format=memory)
    pairs = ([layer.stride] * 2, [padding] * 2, [1] * 2)
    count = batch * size * size
    rest = torch.empty(0, dtype=torch.int32)

    def dense(mask: list[bool]) -> Tensor:
        found = torch.ops.aten.convolution_backward(
            dy, x, weight, None, *pairs, False, [0, 0], 1, mask
        )
        return found[mask.index(True)]

    def linear(of_weight: bool) -> Tensor:
        rows = dy.view(batch, -1)
        return rows.t() @ x.view(batch, -1) if of_weight else rows @ weight.view(layer.out, -1)

    def draw(share: float) -> tuple[Tensor, Tensor, Tensor]:
        scores, sums = cpp.measure_positions(dy, x.shape, weight.shape[2:], *pairs, True)
        start = torch.rand((), dtype=torch.float64)
        return *cpp.draw_positions(scores, math.ceil(count * share), start), sums

    everything = (torch.arange(count, dtype=torch.int32), torch.ones(count))
    half = draw(0.5)[:2]
    mean = x.mean((0, 2, 3))
    none = torch.empty(0)

    def grad_weight(index: Tensor, scale: Tensor, less: Tensor, sums: Tensor) -> Tensor:
        format = memory == LAST
        geometry = (weight.shape, *pairs, 1, format)
        return cpp.list_grad_weight(dy, x, index, scale, rest, less, sums, *geometry)

    def sampled(share: float) -> Tensor:
        index, scale, sums = draw(share)
        return grad_weight(index, scale, mean, sums)

    def grad_input(index: Tensor, scale: Tensor) -> Tensor:
        return cpp.list_grad_input(dy, weight, index, scale, x.shape, *pairs, 1)

    is_linear = layer.size == 1
    return [
        (lambda: linear(True)) if is_linear else (lambda: dense([False, True, False])),
        lambda: grad_weight(*everything, none, none),
        lambda: sampled(0.5),
        lambda: sampled(0.25),
        (lambda: linear(False)) if is_linear else (lambda: dense([True, False, False])),
        lambda: grad_input(*everything),
        lambda: grad_input(*half),
    ]


def measure(runs: list[Callable[[], Tensor]], seconds: float) -> list[float]:
    """Median of each in milliseconds, in rounds of `seconds` in all."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 4:
        for run, own in zip(runs, times, strict=True):
            begin = time.perf_counter()
            run()
            own.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(own[1:]) for own in times]


def main() -> None:
    """Print one table for each memory format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", choices=SETS, default="resnet18")
    parser.add_argument("--memory", nargs="+", default=["channels_last", "contiguous"])
    parser.add_argument("--seconds", type=float, default=2, help="for each layer")
    options = parser.parse_args()
    if cpp.missing():
        raise SystemExit(f"error: {cpp.missing()}")
    torch.set_num_threads(options.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{processor()}, {capability}, {cpp_library().name}, {options.threads} threads")
    print(f"torch {torch.__version__}, batch {options.batch}, milliseconds (ratio)")
    for name in options.memory:
        memory = LAST if name == "channels_last" else torch.contiguous_format
        rows, ratios = [], []
        for layer in SETS[options.layers]:
            found = measure(functions(layer, options.batch, memory), options.seconds)
            own = [found[0] / t for t in found[:4]] + [found[4] / t for t in found[4:]]
            ratios.append([math.log(ratio) for ratio in own])
            rows.append(
                [str(layer), *(f"{t:.2f} ({r:.2f})" for t, r in zip(found, own, strict=True))]
            )
        means = [f"{math.exp(statistics.mean(column)):.2f}" for column in zip(*ratios, strict=True)]
        rows.append(["geometric mean", *means])
        print(f"\n{table((name, *COLUMNS), rows)}", flush=True)


if __name__ == "__main__":
    main()
