"""CPU time of pruning all that a ResNet-18 step prunes, by the operators and by the C++ kernels.

Columns of the input are pruned as many samples at a time as the op does it.

    python benchmarks/cpu/pruning.py --batch 16

One thread, and that thread's own time: other processes of the machine are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fst import backends, get_strategy
from fst.backends.choice import compute
from fst.basics.machine import processor
from fst.ops.operands import PruneWeight
from fst.ops.prune import prune_columns, prune_grad_output
from fst.rules.masks import samples_in_cache

# (output channels, input channels, kernel, size of the output map, how many), the first layer apart
LAYERS = (
    (64, 64, 3, 56, 4),
    (128, 64, 3, 28, 1),
    (128, 64, 1, 28, 1),
    (128, 128, 3, 28, 3),
    (256, 128, 3, 14, 1),
    (256, 128, 1, 14, 1),
    (256, 256, 3, 14, 3),
    (512, 256, 3, 7, 1),
    (512, 256, 1, 7, 1),
    (512, 512, 3, 7, 3),
)


def thread_time(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of this thread."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.thread_time()
        run()
        taken.append((time.thread_time() - begin) * 1e3)
    return statistics.median(taken[1:])


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contiguous", action="store_true", help="NCHW, not channels_last")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = torch.contiguous_format if options.contiguous else torch.channels_last
    fst, rule, sort = (
        get_strategy("fst"),
        get_strategy("sdgp").grad_input,
        get_strategy("wx").grad_weight,
    )
    operations = ("prune_weight", "prune_grad_output", "prune_columns")
    total = [dict.fromkeys(("torch", "cpp"), 0.0) for _ in operations]
    for outputs, inputs, kernel, size, count in LAYERS:
        weight = torch.randn(outputs, inputs, kernel, kernel).contiguous(memory_format=memory)
        shape = (options.batch, outputs, size, size)
        grad_output = torch.randn(shape).contiguous(memory_format=memory)
        rows, positions = inputs * kernel**2, size**2
        columns = torch.randn(samples_in_cache(grad_output, rows * positions), rows, positions)
        runs = (
            (1, lambda weight=weight: compute(PruneWeight(weight, fst, 1, weight.dtype))),
            (1, lambda dy=grad_output: prune_grad_output(dy, rule, "grad_input", 1, None)),
            (options.batch / len(columns), lambda x=columns: prune_columns(x, sort, None)),
        )
        for name in ("torch", "cpp"):
            with backends.force(**dict.fromkeys(operations, name)):
                for (times, run), sums in zip(runs, total, strict=True):
                    sums[name] += count * times * thread_time(run, options.repeats)
    print(f"{processor()}, torch {torch.__version__}, batch {options.batch}, float32, {memory}\n")
    print("| what | torch ms | cpp ms | ratio |\n|---|---|---|---|")
    names = ("S(W) and S(Wᵀ), fst", f"{rule}, sdgp", f"{sort} of columns, wx")
    for what, times in zip(names, total, strict=True):
        ratio = times["torch"] / times["cpp"]
        print(f"| {what} | {times['torch']:.1f} | {times['cpp']:.1f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
