"""Each layer's GEMMs with every backend that can run here, against the least time they can take.

    python benchmarks/roofline.py --batch 16 --strategies fst sampled

The bound of a GEMM: every operand moves once, and the multiply-adds that the strategy leaves run at
the machine's rate; the larger time counts. The rates are those of a large matrix product
and of a large copy, measured in the same run. A share above 100 % means that a library needs fewer
operations (Winograd) or moves less than the model says.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fst import get_strategy
from fst.backends import backends, prefer
from fst.backends.timing import Timing, sample
from fst.basics.arguments import positive
from fst.basics.text import table
from fst.cli.options.parsing import DTYPES
from fst.lab.arguments import source_and_name
from fst.lab.benchmark import PLAIN, LayerShape, LayerTimes, layer_shapes, time_layer
from fst.models.named import build_architecture
from fst.rules.strategy import GEMMS, Strategy

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}


class Rates(NamedTuple):
    """FLOP/s, where a multiply-add is two, and bytes/s, read and written."""

    compute: float
    bandwidth: float


def measure_rates(device: torch.device, dtype: torch.dtype, repeats: int = 15) -> Rates:
    """Best rates of a large matrix product in ``dtype`` and of a large copy."""
    size = MATMUL_SIZE[device.type]
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    functions = {"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}
    taken = sample(functions, repeats, device)
    seconds = {name: min(samples.done) / 1e3 for name, samples in taken.items()}
    return Rates(2 * size**3 / seconds["matmul"], 2 * source.numel() / seconds["copy"])


def bound(
    shape: LayerShape, gemm: str, dtype: torch.dtype, rates: Rates, strategy: Strategy | None
) -> float:
    """Milliseconds that the GEMM takes at least; ``strategy`` None: the dense one."""
    height, width = shape.output_size
    groups = shape.geometry.groups
    weight = (shape.out_channels, shape.in_channels // groups, *shape.kernel)
    rule = None if strategy is None else strategy.rule(gemm)
    share = 1.0
    if rule is not None and gemm == "grad_weight":  # the other GEMMs compute with the zeros
        kept = rule.kept(gemm, weight, groups, height, width)
        share = kept[0] / kept[1] if kept else 1.0
    multiply_adds = shape.batch * height * width * math.prod(weight) * share
    moved = math.prod(weight)
    moved += shape.batch * shape.in_channels * shape.height * shape.width
    moved += shape.batch * shape.out_channels * height * width
    compute, memory = 2 * multiply_adds / rates.compute, moved * dtype.itemsize / rates.bandwidth
    return 1e3 * max(compute, memory)


def other_backends(layer: LayerTimes) -> list[tuple[str, str]]:
    """Operation and backend, one at a time: those that can run here and were not chosen."""
    chosen = {
        (operation, decision.backend)
        for of_part in layer.decisions.values()
        for of_strategy in of_part.values()
        for operation, decision in of_strategy.items()
    }
    asked = {operation for operation, _ in chosen} | set(GEMMS)
    return [
        (operation, backend.name)
        for operation in sorted(asked)
        for backend in backends(operation)
        if (operation, backend.name) not in chosen and not backend.missing()
    ]


def _computed(layer: LayerTimes, gemm: str, strategy: str, operation: str) -> str | None:
    """The backend that computed an operation of a GEMM; None where it was not asked for."""
    decision = layer.decisions[gemm][strategy].get(operation)
    return None if decision is None else decision.backend


def rows_of(
    layer: LayerTimes, strategies: dict[str, Strategy], dtype: torch.dtype, rates: Rates
) -> list[list[str]]:
    """A row for each GEMM and candidate of one timed layer."""
    rows = []
    for gemm in GEMMS:
        plain = layer.times[gemm][PLAIN].median
        for name, timing in layer.times[gemm].items():
            strategy = strategies.get(name)
            least = bound(layer.shape, gemm, dtype, rates, strategy)
            rows.append([gemm, name, *_cells(timing, plain, least)])
    return [[str(layer.shape), *row] for row in rows]


def _cells(timing: Timing, plain: float, least: float) -> list[str]:
    ratio = f"{plain / timing.median:.2f}"
    return [str(timing), ratio, f"{least / timing.median:.0%} of {least:.3g}"]


def main() -> int:
    """Time, print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18", help="[timm:|fst:]NAME (resnet18)")
    parser.add_argument("--batch", type=positive, default=16, help="batch size (16)")
    parser.add_argument("--size", type=positive, default=224, help="of the images (224)")
    parser.add_argument("--strategies", nargs="+", default=["fst"], help="(fst)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(float32)")
    parser.add_argument("--repeats", type=positive, default=9, help="rounds (9)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    model = build_architecture(*source_and_name(options.model), num_classes=1000).to(device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    labels = torch.randint(1000, (options.batch,), device=device)
    shapes = layer_shapes(model, lambda: F.cross_entropy(model(images), labels))
    strategies = {text: get_strategy(text) for text in options.strategies}
    rates = measure_rates(device, dtype)
    print(f"{rates.compute / 1e9:.3g} GFLOP/s, {rates.bandwidth / 1e9:.3g} GB/s")
    rows, failed = [], {}
    for shape, names in shapes.items():
        print(f"{shape} …", file=sys.stderr, flush=True)

        def timed(shape=shape, names=names) -> LayerTimes:
            return time_layer(
                shape,
                len(names),
                strategies,
                device=device,
                dtype=dtype,
                memory_format=torch.channels_last,
                repeats=options.repeats,
            )

        chosen = timed()
        rows += rows_of(chosen, strategies, dtype, rates)
        for operation, backend in other_backends(chosen):
            title = f"{operation}={backend}"
            try:
                with prefer(**{operation: backend}):
                    other = timed()
            except Exception as error:  # whatever kernels raise that have not run here before
                failed[f"{shape}, {title}"] = f"{type(error).__name__}: {error}"
                continue
            rows += [
                [where, gemm, f"{name}, {title}", *cells]
                for where, gemm, name, *cells in rows_of(other, strategies, dtype, rates)
                if name in strategies and _computed(other, gemm, name, operation) == backend
            ]
    titles = ["layer", "GEMM", "candidate", "ms (quartiles)", "dense time / time"]
    print(table([*titles, "share of the bound"], rows, markdown=True))
    print("\n".join(f"{name} did not run: {reason}" for name, reason in failed.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
