"""Times of a convolution's three products by zeros of the maps, beside torch's own, in turns.

    python benchmarks/cpu/zeros_maps.py --threads 1 --networks resnet18 vgg16

With one thread the times are of the processor, which other processes of the machine do not count
in. Packing is included. A ratio is torch's median time by ours.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fst.basics.machine import processor
from fst.ops.cpp import zeros_maps

LAST = torch.channels_last
GEOMETRY = ((1, 1), (1, 1), (1, 1))
# (input channels, output channels, size of the map), how often, share of zeros in dY
RESNET18 = (((64, 64, 56), 4), ((128, 128, 28), 3), ((256, 256, 14), 3), ((512, 512, 7), 3))
STRIDED = (((64, 128, 56), 1), ((128, 256, 28), 1), ((256, 512, 14), 1))
VGG16 = (
    ((64, 64, 224), 1, 0.85),
    ((64, 128, 112), 1, 0.5),
    ((128, 128, 112), 1, 0.86),
    ((128, 256, 56), 1, 0.52),
    ((256, 256, 56), 2, 0.7),
    ((256, 512, 28), 1, 0.52),
    ((512, 512, 28), 2, 0.7),
    ((512, 512, 14), 3, 0.65),
)


def with_zeros(shape: tuple[int, ...], share: float) -> Tensor:
    """Normal numbers, of which a share is zero."""
    values = torch.randn(shape)
    return values.masked_fill_(torch.rand(shape) < share, 0).contiguous(memory_format=LAST)


def pruned(maps: Tensor, n: int, m: int) -> Tensor:
    """Of m neighbouring channels the n largest."""
    groups = maps.permute(0, 2, 3, 1).unflatten(-1, (-1, m))
    kept = torch.zeros_like(groups).scatter_(-1, groups.abs().topk(n, -1).indices, 1.0)
    return (groups * kept).flatten(-2).permute(0, 3, 1, 2)


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turns, in both orders."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(rounds + 1):
        for name in list(runs)[:: 1 if round % 2 else -1]:
            begin = clock()
            runs[name]()
            if round:
                taken[name].append((clock() - begin) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def layer(
    x: Tensor, dy: Tensor, dys: dict[str, Tensor], stride: int, rounds: int
) -> dict[str, float]:
    """Times of torch's products (Y, dX, dW) and of those by zeros of X, or of a dY by its name."""
    weight = torch.randn(dy.shape[1], x.shape[1], 3, 3).contiguous(memory_format=LAST)
    geometry = ((stride, stride), *GEOMETRY[1:])

    def torchs(mask: list[bool]) -> object:
        arguments = (dy, x, weight, None, *geometry, False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(*arguments)

    def grad_weight(dy: Tensor, zeros_of: str) -> Tensor:
        listed = (None, None, None, None)
        return zeros_maps.maps_grad_weight(
            dy, x, *listed, weight.shape, *geometry, 1, True, zeros_of
        )

    runs: dict[str, Callable[[], object]] = {
        "Y": lambda: torch.nn.functional.conv2d(x, weight, None, *geometry),
        "dX": lambda: torchs([True, False, False]),
        "dW": lambda: torchs([False, True, False]),
        "Y, X": lambda: zeros_maps.maps_output(x, weight, None, *geometry, 1),
        "dW, X": lambda: grad_weight(dy, "input"),
    }
    for name, maps in dys.items():
        runs[f"dX, {name}"] = lambda maps=maps: zeros_maps.maps_grad_input(
            maps, weight, x.shape, *geometry, 1
        )
        runs[f"dW, {name}"] = lambda maps=maps: grad_weight(maps, "grad_output")
    return medians(runs, rounds)


def resnet18(batch: int, rounds: int, strided: bool) -> None:
    """A row for each layer and product with X half zero, and geometric means."""
    logs: dict[str, list[float]] = {}
    for (inputs, outputs, size), _ in STRIDED if strided else RESNET18:
        stride = 2 if strided else 1
        x = with_zeros((batch, inputs, size, size), 0.5)
        dy = with_zeros((batch, outputs, size // stride, size // stride), 0.0)
        dys = {"dY 2:4": pruned(dy, 2, 4), "dY 4:32": pruned(dy, 4, 32)}
        times = layer(x, dy, dys, stride, rounds)
        ratios = {k: times[k.split(",")[0]] / v for k, v in times.items() if "," in k}
        shown = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{inputs}-{outputs} {size}x{size}/{stride}: {shown}", flush=True)
        for name, ratio in ratios.items():
            logs.setdefault(name, []).append(math.log(ratio))
    means = {name: math.exp(statistics.mean(values)) for name, values in logs.items()}
    print("geometric mean: " + "  ".join(f"{k} {v:.2f}" for k, v in means.items()), flush=True)


def vgg16(batch: int, rounds: int) -> None:
    """Of all convolutions but the first: each product by the sparser operand, and all together."""
    total: dict[str, list[float]] = {}
    for (inputs, outputs, size), count, zeros in VGG16:
        x = with_zeros((batch, inputs, size, size), 0.45)
        dy = with_zeros((batch, outputs, size, size), zeros)
        times = layer(x, dy, {"dY": dy}, 1, rounds)
        best = {
            "Y": times["Y, X"],
            "dX": times["dX, dY"],
            "dW": times["dW, dY"] if zeros > 0.45 else times["dW, X"],
        }
        for name, ours in best.items():
            for key in (name, "all three"):
                sums = total.setdefault(key, [0.0, 0.0])
                sums[0] += count * times[name]
                sums[1] += count * ours
        shown = "  ".join(f"{name} {times[name] / ours:.2f}" for name, ours in best.items())
        print(f"{inputs}-{outputs} {size}x{size}: {shown}", flush=True)
    print("together: " + "  ".join(f"{k} {a / b:.2f}" for k, (a, b) in total.items()), flush=True)


def main() -> None:
    """Print ratios by layer and together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    networks = ("resnet18", "resnet18/2", "vgg16")
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    level = torch.backends.cpu.get_cpu_capability()
    print(f"{processor()}, {level}, torch {torch.__version__}, {options.threads} threads, float32")
    for network in options.networks:
        batch = max(options.batch // 8, 1) if network == "vgg16" else options.batch
        print(f"\n{network}, batch {batch}; torch / ours")
        if network == "vgg16":
            vgg16(batch, options.rounds)
        else:
            resnet18(batch, options.rounds, strided=network == "resnet18/2")


if __name__ == "__main__":
    main()
