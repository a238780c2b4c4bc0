"""Products of convolutions that leave zeros out, beside torch's and SparseProp's, on one page.

    python benchmarks/cpu/zeros.py --threads 2 1 --sparseprop FOLDER

FOLDER is where SparseProp was built; without it the page has dashes there:

    pip install --no-deps --target FOLDER git+https://github.com/IST-DASLab/sparseprop

All programs of a layer run in turns, in both orders; a layer's ratio is one of medians. The page is
docs/results/cpu_zeros_ops.md, or cpu_zeros_ops_avx512.md, as torch's instruction set is. All times
in milliseconds are in benchmarks/out/zeros.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import zeros_page
from measured import MATRIX, NETWORK, ONE, STRATEGY, THREE, Found, Group, Times
from page import OUT, operations_page
from products import Layer, SparseProp, programs

from fst import get_strategy
from fst.backends.timing import Function, compare
from fst.basics.arguments import positive
from fst.basics.machine import keep_freed_memory
from fst.files.checkpoint import write_text_atomically
from fst.lab.benchmark import PLAIN, layer_shapes
from fst.lab.model import Training, from_name
from fst.ops.cpp import missing
from fst.ops.cpp.zeros_weight import zeros_lists
from fst.rules.masks import nm_mask

CPU = torch.device("cpu")


def main() -> None:
    """Measure all, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, nargs="+", default=[2, 1])
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--layers", type=positive, help="the first ones of each group alone")
    parser.add_argument("--sparseprop", type=Path, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=operations_page())
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    keep_freed_memory()
    sparseprop = built(options.sparseprop) if options.sparseprop else None
    found = {threads: measure(threads, options, sparseprop) for threads in options.threads}
    OUT.mkdir(parents=True, exist_ok=True)
    write_text_atomically(json.dumps(as_json(found), indent=1), OUT / "zeros.json")
    version = sparseprop.version if sparseprop else None
    write_text_atomically(zeros_page.page(found, options, version), options.page)


def built(folder: Path) -> SparseProp:
    """SparseProp from its folder, or an error."""
    try:
        return SparseProp(folder)
    except ImportError as error:
        reason = f"must be a folder where SparseProp was built: {error}"
        raise SystemExit(f"error: --sparseprop {folder} {reason}") from error


def measure(threads: int, options: argparse.Namespace, sparseprop: SparseProp | None) -> Found:
    """All groups, and a step."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers: dict[Group, dict[Layer, Times]] = {THREE: {}, ONE: {}}
    for group, times in layers.items():
        for layer in group.layers[: options.layers]:
            print(f"{threads} threads, {layer} …", file=sys.stderr, flush=True)
            rival = sparseprop if group.rivalry else None
            made = programs(layer, options.batch, rival)
            made = {name: program for name, program in made.items() if name in group.programs}
            timings = compare(made, options.rounds, CPU, warmup=1)
            times[layer] = {name: timing.median for name, timing in timings.items()}
    left, right = torch.randn(2, MATRIX, MATRIX)
    matrix = compare({"product": lambda: left @ right}, options.rounds, CPU)["product"].median
    return Found(layers, matrix, step_times(options.batch, options.rounds))


def step_times(batch: int, rounds: int) -> Times:
    """Training steps of the network, plain and with 2:4 weights, and building its lists."""
    training = from_name(NETWORK, batch)
    strategies = {PLAIN: None, STRATEGY: get_strategy(STRATEGY)}
    steps = {name: training.candidate(strategy)[1] for name, strategy in strategies.items()}
    timings = compare({**steps, "lists": all_lists(training)}, min(rounds, 3), CPU, warmup=1)
    return {name: timing.median for name, timing in timings.items()}


def all_lists(training: Training) -> Function:
    """Building the lists of Y and of dX of all layers with 2:4 weights, each once."""
    calls = []
    shapes = layer_shapes(training.model, lambda: training.loss(training.model))
    for shape, names in shapes.items():
        if shape.in_channels % 4:
            continue
        weight = torch.randn(shape.out_channels, shape.in_channels, *shape.kernel)
        weight = weight.contiguous(memory_format=torch.channels_last)
        weight *= nm_mask(weight, 2, 4, 1)
        size = (shape.batch, shape.in_channels, shape.height, shape.width)
        calls += len(names) * [(weight, size, *shape.geometry)]
    return lambda: [
        zeros_lists(*call, grad_input) for call in calls for grad_input in (False, True)
    ]


def as_json(found: dict[int, Found]) -> dict[str, object]:
    """All times by their names."""
    return {
        f"{threads} threads": {
            "matrix": of.matrix,
            "step": of.step,
            **{
                group.title: {str(layer): times for layer, times in layers.items()}
                for group, layers in of.layers.items()
            },
        }
        for threads, of in found.items()
    }


if __name__ == "__main__":
    main()
