"""Times of products of convolutions that leave out zeros, beside torch's dense ones.

Packing and lists are included. Programs run in turns, in both orders; ratios are of medians.

    python benchmarks/cpu/zeros.py --threads 2 --batch 32

With one thread it is the process's own time: other processes of the machine are not counted.
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
from fst.ops.cpp import zeros_weight
from fst.ops.geometry import Geometry, convolve, gradients
from fst.rules.masks import nm_mask

# input channels, output channels, size of the input map, kernel, stride
RESNET18 = (
    (64, 64, 56, 3, 1),
    (64, 128, 56, 3, 2),
    (128, 128, 28, 3, 1),
    (128, 256, 28, 3, 2),
    (256, 256, 14, 3, 1),
    (256, 512, 14, 3, 2),
    (512, 512, 7, 3, 1),
)
RESNET50 = (
    (512, 128, 28, 1, 1),
    (128, 512, 28, 1, 1),
    (1024, 256, 14, 1, 1),
    (256, 1024, 14, 1, 1),
    (2048, 512, 7, 1, 1),
    (512, 2048, 7, 1, 1),
)
PATTERNS = ((2, 4), (1, 4), (1, 8))


def times_in_turns(
    programs: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each program, all run after each other, forwards and backwards."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name in list(programs)[:: -1 if turn % 2 else 1]:
            begin = clock()
            programs[name]()
            taken[name].append((clock() - begin) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def pruned(weight: Tensor, n: int, m: int, dim: int) -> Tensor:
    """The weight with its n largest of m along ``dim``, channels_last."""
    return (weight * nm_mask(weight, n, m, dim)).contiguous(memory_format=torch.channels_last)


def weight_zeros(
    shape: tuple[int, int, int, int, int], batch: int, product: str
) -> dict[str, Callable[[], object]]:
    """Programs of one product of one layer: torch's dense one, and ours for each pattern."""
    inside, out, size, kernel, stride = shape
    geometry = Geometry((stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
    last = torch.channels_last
    input = torch.randn(batch, inside, size, size).contiguous(memory_format=last)
    weight = torch.randn(out, inside, kernel, kernel).contiguous(memory_format=last)
    if product == "Y":
        programs = {"dense": lambda: convolve(input, weight, None, geometry)}
        for n, m in PATTERNS:
            of_output = pruned(weight, n, m, 1)
            programs[f"{n}:{m}"] = lambda weight=of_output: zeros_weight.zeros_output(
                input, weight, None, None, *geometry
            )
        return programs
    grad_output = torch.randn_like(convolve(input, weight, None, geometry))
    needed = (True, False, False)
    programs = {"dense": lambda: gradients(grad_output, input, weight, geometry, needed)}
    for n, m in PATTERNS:
        of_input = pruned(weight, n, m, 0)
        programs[f"{n}:{m}"] = lambda weight=of_input: zeros_weight.zeros_grad_input(
            grad_output, weight, input.shape, *geometry
        )
    return programs


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    instructions = torch.backends.cpu.get_cpu_capability()
    print(
        f"{processor()}, {instructions}, torch {torch.__version__}, float32, channels_last, "
        f"batch {options.batch}, {options.threads} threads; torch's time / ours\n"
    )
    names = [f"{n}:{m}" for n, m in PATTERNS]
    print(f"| layer | dense ms | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for title, shapes in (("3x3", RESNET18), ("1x1", RESNET50)):
        for product in ("Y", "dX"):
            gains: dict[str, list[float]] = {name: [] for name in names}
            for shape in shapes:
                programs = weight_zeros(shape, options.batch, product)
                times = times_in_turns(programs, options.repeats, clock)
                for name in names:
                    gains[name].append(times["dense"] / times[name])
                inside, out, size, kernel, stride = shape
                cells = " | ".join(f"{gains[name][-1]:.2f}" for name in names)
                layer = f"{product} {inside}→{out}, {size}², {kernel}x{kernel}, stride {stride}"
                print(f"| {layer} | {times['dense']:.1f} | {cells} |", flush=True)
            means = (math.exp(statistics.mean(map(math.log, gains[name]))) for name in names)
            cells = " | ".join(f"**{mean:.2f}**" for mean in means)
            print(f"| {product} {title}, geometric mean | | {cells} |", flush=True)


if __name__ == "__main__":
    main()
