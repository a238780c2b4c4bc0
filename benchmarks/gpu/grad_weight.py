"""Weight gradients of ResNet's convolutions: cuDNN dense and strided against the own kernel.

    python benchmarks/gpu/grad_weight.py --batch 256
    python benchmarks/gpu/grad_weight.py --tiles                        # every tile of the kernel
    TRITON_INTERPRET=1 python benchmarks/gpu/grad_weight.py --smoke     # does it run, on a CPU

bfloat16, channels_last, pairs along rows, 1x1 kernels with the kept half of their input. The
contestants are timed in turns, with the L2 cache flushed before each call. Writes JSON: medians and
quartiles in milliseconds, the FLOPs and the bytes that each needs (each operand once), how often a
ResNet has the layer, and how far each result is from cuDNN's of the same mathematics; prints the
speed against cuDNN dense, and geometric means of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst import backends
from fst.backends import cache, sources
from fst.lab.benchmark import Function, compare, geometric_mean
from fst.ops import triton as ops
from fst.ops.geometry import Geometry, gradients
from fst.ops.positions import fixed, strided
from fst.rules.alternating import Alternating

DENSE = "cuDNN dense"
HALF = "cuDNN strided, torch pair sum"
RULE = Alternating()


class Layer(NamedTuple):
    """A convolution with padding kernel // 2; ``size`` is the height and width of its output.

    ``counts``: how often ResNet-18 and ResNet-50 have it.
    """

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int
    counts: tuple[int, int]

    def __str__(self) -> str:
        kernel = f"{self.kernel}x{self.kernel}"
        return f"{self.inputs}->{self.outputs} {kernel} s{self.stride} {self.size}x{self.size}"


LAYERS = (
    Layer(3, 64, 7, 2, 112, (1, 1)),
    Layer(64, 64, 3, 1, 56, (4, 3)),
    Layer(64, 128, 3, 2, 28, (1, 0)),
    Layer(128, 128, 3, 1, 28, (3, 3)),
    Layer(128, 256, 3, 2, 14, (1, 0)),
    Layer(256, 256, 3, 1, 14, (3, 5)),
    Layer(256, 512, 3, 2, 7, (1, 0)),
    Layer(512, 512, 3, 1, 7, (3, 2)),
    Layer(64, 128, 1, 2, 28, (1, 0)),
    Layer(128, 256, 1, 2, 14, (1, 0)),
    Layer(256, 512, 1, 2, 7, (1, 0)),
    Layer(128, 128, 3, 2, 28, (0, 1)),
    Layer(256, 256, 3, 2, 14, (0, 1)),
    Layer(512, 512, 3, 2, 7, (0, 1)),
    Layer(64, 64, 1, 1, 56, (0, 1)),
    Layer(64, 256, 1, 1, 56, (0, 4)),
    Layer(256, 64, 1, 1, 56, (0, 2)),
    Layer(256, 128, 1, 1, 56, (0, 1)),
    Layer(128, 512, 1, 1, 28, (0, 4)),
    Layer(512, 128, 1, 1, 28, (0, 3)),
    Layer(256, 512, 1, 2, 28, (0, 1)),
    Layer(512, 256, 1, 1, 28, (0, 1)),
    Layer(256, 1024, 1, 1, 14, (0, 6)),
    Layer(1024, 256, 1, 1, 14, (0, 5)),
    Layer(512, 1024, 1, 2, 14, (0, 1)),
    Layer(1024, 512, 1, 1, 14, (0, 1)),
    Layer(512, 2048, 1, 1, 7, (0, 3)),
    Layer(2048, 512, 1, 1, 7, (0, 2)),
    Layer(1024, 2048, 1, 2, 7, (0, 1)),
)
SMOKE = (Layer(8, 16, 3, 1, 6, (1, 1)), Layer(16, 8, 1, 1, 6, (1, 1)))
SIZES = ((64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128))
TILES = tuple((m, n, k) for (m, n), k in itertools.product(SIZES, (32, 64)))


def main() -> None:
    """Measure, print, write."""
    options = parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")
    missing = sources.triton_missing()
    if missing:
        sys.exit(f"error: {missing}; with TRITON_INTERPRET=1 and --smoke it runs on a CPU")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    batch = 2 if options.smoke else options.batch
    repeats = 1 if options.smoke else options.repeats
    rows: list[dict[str, Any]] = []
    layers = [layer for layer in LAYERS if options.kernel in (None, layer.kernel)]
    for layer in SMOKE if options.smoke else layers:
        problem = Operands(layer, batch, device)
        functions = problem.contestants()
        if options.tiles:
            functions |= problem.tiles(TILES[:1] if options.smoke else TILES)
        with torch.no_grad():
            differences = _differences({name: run() for name, run in functions.items()})
            times = compare(functions, repeats, device)
        for name, timing in times.items():
            row = {**layer._asdict(), "contestant": name, **timing._asdict(), **problem.model(name)}
            row["speed"] = times[DENSE].median / timing.median
            row["difference"] = differences[name]
            rows.append(row)
            print(f"{layer!s:24s} {name:32s} {timing!s:32s} ms {row['speed']:6.2f}x", flush=True)
    means = _means(rows)
    for network, kernel, name, speed in means:
        print(f"geometric mean, {network} {kernel}x{kernel}: {name:32s} {speed:6.2f}x")
    header = {
        "command": shlex.join(["python", *sys.argv]),
        **cache.environment(device),
        "batch": batch,
        "rounds": repeats,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"header": header, "rows": rows, "means": means}, indent=1))
    print(f"written: {options.out}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--batch", type=int, default=256, help="batch size (256)")
    made.add_argument("--repeats", type=int, default=15, help="rounds (15)")
    made.add_argument("--kernel", type=int, choices=(1, 3, 7), help="only kernels of this size")
    made.add_argument("--tiles", action="store_true", help="also every tile of the own kernel")
    made.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    made.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/grad_weight.json"), help="JSON to write"
    )
    return made


class Operands:
    """Random operands of a layer, and the functions that compute its weight gradient of them."""

    def __init__(self, layer: Layer, batch: int, device: torch.device) -> None:
        def random(*size: int) -> Tensor:
            values = torch.randn(size, device=device).bfloat16()
            return values.contiguous(memory_format=torch.channels_last)

        size = layer.size * layer.stride
        edge = layer.kernel // 2
        self.input = random(batch, layer.inputs, size, size)
        self.weight = random(layer.outputs, layer.inputs, layer.kernel, layer.kernel)
        self.grad_output = random(batch, layer.outputs, layer.size, layer.size)
        self.geometry = Geometry((layer.stride,) * 2, (edge,) * 2, (1, 1), 1)
        self.size = (layer.size, layer.size)
        lattices = RULE.kept_positions(*self.size, 0)
        (self.lattice,) = lattices
        (self.sums,) = fixed.sum_grad_output(self.grad_output, RULE, lattices, 0)

    def contestants(self) -> dict[str, Function]:
        """The library's dense kernel, the half of it with and without its sums, the own kernel."""
        return {
            DENSE: self._dense,
            HALF: lambda: self._forced("strided", "torch"),
            "cuDNN strided, triton pair sum": lambda: self._forced("strided", "triton"),
            "cuDNN strided, sums not counted": self._from_sums,
            "triton, fused": lambda: self._forced("triton", "torch"),
            "triton, sums not counted": lambda: self._own(self.sums, self.input, 2),
            "triton, dense": lambda: self._own(self.grad_output, self.input, 1),
        }

    def tiles(self, sizes: Sequence[tuple[int, int, int]]) -> dict[str, Function]:
        """The fused kernel with tiles of these sizes."""
        return {
            "triton " + "x".join(map(str, size)): functools.partial(self._with_tile, *size)
            for size in sizes
        }

    def model(self, name: str) -> dict[str, float]:
        """FLOPs and bytes of a contestant, each operand moved once; workspaces do not count."""
        share = 1.0 if name.endswith("dense") else self.sums.numel() / self.grad_output.numel()
        read = self.input.numel() * (share if self.weight.shape[2] == 1 else 1)
        moved = self.grad_output.numel() + read + self.weight.numel()
        if name.endswith("pair sum"):
            moved += 2 * self.sums.numel()
        elif name.endswith("not counted"):
            moved -= self.grad_output.numel() - self.sums.numel()
        products = self.weight[0].numel() * self.grad_output.numel()
        return {"flops": 2 * share * products, "bytes": moved * self.weight.itemsize}

    def _dense(self) -> Tensor | None:
        return gradients(
            self.grad_output, self.input, self.weight, self.geometry, (False, True, False)
        )[1]

    def _forced(self, name: str, sums: str) -> Tensor:
        with backends.force(grad_weight=name, sum_grad_output=sums):
            operands = (self.grad_output, self.input, self.weight, self.geometry)
            return fixed.grad_weight(*operands, RULE, 0)

    def _from_sums(self) -> Tensor:
        where = (self.lattice, self.size, self.geometry)
        return strided.grad_weight(self.sums, self.input, self.weight, *where)

    def _own(self, grad_output: Tensor, input: Tensor, step: int) -> Tensor:
        """The own kernel at all positions of grad_output, whose windows are ``step`` apart."""
        edge, stride = self.geometry.padding[0], self.geometry.stride[0]
        window = (-edge, stride, -edge, stride * step)
        everywhere = (0, 1, 0, 1)
        return ops.grad_weight(
            grad_output, [input], self.weight, (1, 1), False, everywhere, window, (1, 1), 1
        )

    def _with_tile(self, m: int, n: int, k: int) -> Tensor:
        module = sources.load("grad_weight")
        tile = module.Tile(m, n, k, 8 if m * n >= 128 * 256 else 4)
        window = strided.window_start(self.lattice, self.geometry)
        problem = module.Problem(RULE.block, True, [self.lattice], [window], (1, 1), 1)
        out = torch.empty_like(self.weight)
        for launch in module.launches(self.grad_output, [self.input], out, problem, tile):
            launch.run()
        return out


def _differences(results: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each from cuDNN's of the same mathematics, over the largest value."""
    found = {}
    for name, result in results.items():
        wanted = results[DENSE if name.endswith("dense") else HALF].float()
        found[name] = ((result.float() - wanted).abs().max() / wanted.abs().max()).item()
    return found


def _means(rows: list[dict[str, Any]]) -> list[tuple[str, int, str, float]]:
    """Network, kernel size, contestant, geometric mean of its speed over all such convolutions."""
    found = []
    names = dict.fromkeys(row["contestant"] for row in rows)
    for (index, network), kernel in itertools.product(
        enumerate(("ResNet-18", "ResNet-50")), (3, 1)
    ):
        for name in names:
            speeds = [
                itertools.repeat(row["speed"], row["counts"][index])
                for row in rows
                if (row["contestant"], row["kernel"]) == (name, kernel)
            ]
            speed = geometric_mean(itertools.chain.from_iterable(speeds))
            if not math.isnan(speed):
                found.append((network, kernel, name, speed))
    return found


if __name__ == "__main__":
    main()
