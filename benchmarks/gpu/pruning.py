"""Bandwidth of the pruning kernels against a copy, torch and SDGP's kernel design.

    python benchmarks/gpu/pruning.py --batch 256
    TRITON_INTERPRET=1 python benchmarks/gpu/pruning.py --smoke     # does it run, on a CPU

Every candidate moves through several tensors in turn, so that none finds its operands in the L2
cache; on a GPU the turn is a CUDA graph, so that launching costs nothing. Writes JSON: medians and
quartiles in milliseconds, bytes that must be moved (each operand once), GB/s, and the share of the
copy's GB/s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import extension
import torch
from torch import Tensor

import fst
from fst import NM, Strategy
from fst.backends import sources
from fst.backends.choice import compute
from fst.backends.timing import compare, geometric_mean
from fst.basics.text import table
from fst.cli.environment import surroundings
from fst.ops.backends import prune_triton as ops
from fst.ops.operands import PruneWeight
from fst.ops.prune import prune_grad_output

SHAPES = ((64, 112), (64, 56), (128, 28), (256, 14), (512, 7))  # channels, height = width
PATTERNS = ((1, 4), (4, 8))
BEYOND_L2 = 2**28  # bytes
Function = Callable[[Tensor], object]


def main() -> None:
    """Measure, print, write."""
    options = parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")
    missing = sources.triton_missing()
    if missing:
        sys.exit(f"error: {missing}; with TRITON_INTERPRET=1 and --smoke it runs on a CPU")
    torch.manual_seed(0)
    shapes = ((8, 4),) if options.smoke else SHAPES
    batch = 2 if options.smoke else options.batch
    repeats = 1 if options.smoke else options.repeats
    formats = (torch.channels_last, torch.contiguous_format)
    rows: list[dict[str, Any]] = []
    for (channels, size), layout in itertools.product(shapes, formats):
        like = torch.randn(batch, channels, size, size, dtype=torch.bfloat16)
        like = like.to(device, memory_format=layout)
        name = {"shape": list(like.shape), "memory_format": str(layout)}
        few = [(1, 4)] if options.smoke else PATTERNS
        candidates = gradient_candidates(like, few)
        rows += measure(name, like, candidates, repeats, options.smoke)
    for layout in formats:
        rows += measure_weights(device, layout, repeats, options.smoke)
    header = {
        "command": shlex.join(["python", *sys.argv]),
        **surroundings(device),
        "batch": batch,
        "rounds": repeats,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"header": header, "rows": rows}, indent=1))
    print(summary(rows))
    print(f"written: {options.out}")


def summary(rows: list[dict[str, Any]]) -> str:
    """The shares of a copy's bandwidth: geometric mean over the shapes of maps, and their range."""
    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "shape" in row and row["candidate"] != "copy":
            layouts = shares.setdefault(row["candidate"], {})
            layouts.setdefault(row["memory_format"], []).append(row["share_of_copy"])
    cells = [
        (name, *(f"{geometric_mean(of):.0%} ({min(of):.0%} to {max(of):.0%})" for of in found))
        for name, found in ((name, layouts.values()) for name, layouts in shares.items())
    ]
    return table(("candidate", "channels_last", "contiguous"), cells, markdown=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--batch", type=int, default=256, help="batch size (256)")
    made.add_argument("--repeats", type=int, default=15, help="rounds (15)")
    made.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    made.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/pruning.json"), help="JSON to write"
    )
    return made


def gradient_candidates(
    like: Tensor, patterns: list[tuple[int, int]]
) -> Iterator[tuple[str, Function, float]]:
    """Name, function, and elements moved over elements of grad_output."""
    seed = torch.tensor([1], device=like.device)

    def kernel(n: int, m: int, rule: str = "magnitude", rescale: str = "") -> Function:
        return lambda x: ops.prune_grad_output(x, n, m, rule, rescale, 1, seed)

    yield "copy", torch.clone, 2
    yield "torch 2:4", lambda x: prune_grad_output(x, NM("grad_output"), "grad_input", 1, None), 2
    yield "triton 2:4", kernel(2, 4), 2
    yield "triton 2:4 random", kernel(2, 4, "random"), 2
    for rescale in ("group", "sample_channel"):
        yield f"triton 2:4 {rescale}", kernel(2, 4, "magnitude_rescaled", rescale), 2
    for n, m in patterns:
        yield f"triton {n}:{m}", kernel(n, m), 2
    if not extension.missing():
        baseline = sdgp_design()
        for n, m in ((2, 4), (4, 8)):
            yield f"one thread per group {n}:{m}", lambda x, n=n, m=m: baseline.prune(x, n, m), 2


@functools.cache
def sdgp_design() -> ModuleType:
    """SDGP's published kernel design, built on first use: magnitude along the channels of a
    contiguous or channels_last tensor, m 4 or 8.
    """
    files = ("prune_baseline.cpp", "prune_baseline_sm80.cu")
    return extension.build("fst_prune_baseline", files)


def measure(
    name: dict[str, Any],
    like: Tensor,
    candidates: Iterator[tuple[str, Function, float]],
    repeats: int,
    smoke: bool,
) -> list[dict[str, Any]]:
    """Time the candidates on tensors like ``like``."""
    count = 1 if smoke else max(1, math.ceil(BEYOND_L2 / (like.numel() * like.itemsize)))
    tensors = [torch.randn_like(like) for _ in range(count)]
    functions, moved = {}, {}
    for candidate, function, share in candidates:
        functions[candidate] = _turn(
            lambda function=function: [function(x) for x in tensors], like.device
        )
        moved[candidate] = share * count * like.numel() * like.itemsize
    return _rows(name, functions, moved, repeats, like.device)


def measure_weights(
    device: torch.device, layout: torch.memory_format, repeats: int, smoke: bool
) -> list[dict[str, Any]]:
    """S(W) and S(Wᵀ) of a ResNet-18's weights in bfloat16."""
    strategy = fst.get_strategy("fst")
    shapes = [(8, 8, 3, 3), (8, 8, 1, 1)] if smoke else _resnet18_shapes()
    weights = [torch.randn(s).to(device, memory_format=layout) for s in shapes]
    dtype = torch.bfloat16
    functions = {
        "copy": lambda: [w.clone() for w in weights],
        "torch S(W), S(Wt)": lambda: _prune_each(weights, strategy, dtype),
        "triton S(W), S(Wt), masks": lambda: [
            ops.prune_weight(weight, 1, (2, 4, 2, 4), dtype) for weight in weights
        ],
    }
    count = sum(w.numel() for w in weights)
    shares = (8, 8, 9)  # bytes for each weight
    moved = {name: share * count for name, share in zip(functions, shares, strict=True)}
    turns = {name: _turn(function, device) for name, function in functions.items()}
    name = {"weights": count, "tensors": len(weights), "memory_format": str(layout)}
    return _rows(name, turns, moved, repeats, device)


def _prune_each(weights: list[Tensor], strategy: Strategy, dtype: torch.dtype) -> None:
    for weight in weights:
        compute(PruneWeight(weight, strategy, 1, dtype))


def _resnet18_shapes() -> list[tuple[int, int, int, int]]:
    shapes = [(64, 3, 7, 7), *[(64, 64, 3, 3)] * 4]
    for channels in (128, 256, 512):
        half = channels // 2
        shapes += [(channels, half, 3, 3), *[(channels, channels, 3, 3)] * 3]
        shapes.append((channels, half, 1, 1))
    return shapes


def _turn(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``function``, on a GPU as the replay of a CUDA graph."""
    if device.type != "cuda":
        return function
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _rows(
    name: dict[str, Any],
    functions: dict[str, Callable[[], object]],
    moved: dict[str, float],
    repeats: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    with torch.no_grad():
        times = compare(functions, repeats, device)
    speeds = {candidate: moved[candidate] / t.median / 1e6 for candidate, t in times.items()}
    rows = []
    for candidate, timing in times.items():
        row = {
            **name,
            "candidate": candidate,
            **timing._asdict(),
            "bytes": moved[candidate],
            "gb_per_s": speeds[candidate],
            "share_of_copy": speeds[candidate] / speeds["copy"],
        }
        rows.append(row)
        where = " ".join(str(value) for value in name.values())
        print(
            f"{where:55s} {candidate:30s} {timing.median:9.3f} ms "
            f"{row['gb_per_s']:8.0f} GB/s {row['share_of_copy']:6.1%} of copy",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
