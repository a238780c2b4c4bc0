"""Training steps as CUDA graphs, beside PyTorch's: what a step takes where no host is waited for.

    python benchmarks/gpu/captured.py --batch 256

Prints a table and writes JSON: medians and quartiles of all steps in turns, in both orders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

import fst
from fst.backends.timing import Timing, sample
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.basics.errors import UsageError
from fst.cli.environment import surroundings
from fst.lab.benchmark.layers import PLAIN
from fst.lab.model import from_name

STRATEGIES = ["dense", "srste", "fst_w", "fst", "sdgp"]
WARMUP = 5  # steps before the capture, in which layers choose their backends


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as the replay of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18", help="as of fst bench (resnet18)")
    parser.add_argument("--batch", type=positive, default=256, help="batch size (256)")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (15)")
    parser.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, help=f"({' '.join(STRATEGIES)})"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/captured.json"), help="JSON to write"
    )
    add_traceback(parser)
    options = parser.parse_args()
    device = torch.device("cuda")
    with user_errors(options):
        if not torch.cuda.is_available():
            raise UsageError("CUDA graphs need a CUDA device, and PyTorch finds none.")
        strategies = {name: fst.get_strategy(name) for name in options.strategies}
        training = from_name(options.model, options.batch, dtype="bfloat16", device=device)
    steps = {}
    for name, strategy in {PLAIN: None, **strategies}.items():
        _, step = training.candidate(strategy)
        steps[name] = step
        steps[f"{name}, captured"] = captured(step)
    taken = sample(steps, options.repeats, device)
    times = {name: Timing.of(samples.done) for name, samples in taken.items()}
    host = {name: Timing.of(samples.returned) for name, samples in taken.items()}
    eager = times[PLAIN].median
    for name, timing in times.items():
        speed = f"{eager / timing.median:.3f} of torch's speed"
        print(f"{name:16s} {timing!s:24s} {speed}, host {host[name].median:.2f} ms")
    found = {name: {"ms": list(times[name]), "host ms": list(host[name])} for name in times}
    written = {"model": options.model, "batch": options.batch, **surroundings(device)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**written, "steps": found}, indent=1, default=str) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
