"""2:4 convolutions against cuDNN, layer by layer: is a sparse kernel worth it there, and why not.

    python benchmarks/gpu/sparse24.py --batch 256
    python benchmarks/gpu/sparse24.py --models resnet18 vgg16_300

bfloat16, channels_last. For each distinct convolution of the models with at least 64 channels: the
output and grad_input by cuDNN (weights masked) and by the mma.sp kernel, 1x1 outputs by cuSPARSELt
too; timed in turns, in both orders, with the L2 cache flushed before each call. Then the packing of
all weights of a model, in turns with a copy of as many bytes. Prints the speed against cuDNN,
TFLOP/s (of the dense convolution) and their share of the peak that 2:4 doubles; "go" is at least
5 % faster. Writes JSON with medians and quartiles.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from fst.backends import cache, sources
from fst.lab.benchmark import LayerShape, Timing, compare, geometric_mean, layer_shapes
from fst.ops import sparse24
from fst.ops.geometry import gradients
from fst.ops.prune import prune_weight
from fst.strategies.registry import get_strategy

LEAST_CHANNELS, LEAST_GAIN = 64, 1.05
CUDNN = "cuDNN"
Functions = dict[str, Callable[[], object]]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and sources.cuda_missing():
        sys.exit(f"error: {sources.cuda_missing()}")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    packings: list[dict[str, Any]] = []
    for name in options.models:
        model, size = a_model(name)
        shapes = layer_shapes(model, functools.partial(model.eval(), torch.zeros(1, 3, size, size)))
        for shape, names in shapes.items():
            shape = shape._replace(batch=options.batch)
            channels = min(shape.in_channels, shape.out_channels) // shape.geometry.groups
            if channels >= options.least_channels and not unsupported(shape):
                for row in layer_rows(shape, device, options):
                    rows.append({"model": name, "count": len(names), **row})
        packings.append({"model": name, **packing_row(model, device, options.repeats)})
    header = {
        "command": shlex.join(["python", *sys.argv]),
        **cache.environment(device),
        "batch": options.batch,
        "rounds": options.repeats,
        "peak_tflops": options.peak_tflops,
    }
    result = {"header": header, "rows": rows, "packing": packings, "means": means(rows)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1))
    print(f"written: {options.out}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["resnet18", "resnet50", "vgg16_300"]
    made.add_argument(
        "--models", nargs="+", default=models, help="of torchvision, _SIZE for images not of 224"
    )
    made.add_argument("--batch", type=int, default=256, help="batch size (256)")
    made.add_argument("--repeats", type=int, default=15, help="rounds (15)")
    made.add_argument("--device", default="cuda", help="cuda")
    made.add_argument(
        "--least-channels", type=int, default=LEAST_CHANNELS, help="of layers to measure (64)"
    )
    made.add_argument(
        "--peak-tflops", type=float, default=989.0, help="dense bfloat16 peak (989: H200)"
    )
    made.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/sparse24.json"), help="JSON to write"
    )
    return made


def a_model(name: str) -> tuple[nn.Module, int]:
    """A torchvision model without weights worth having, and the side of its images."""
    base, _, size = name.partition("_")
    return torchvision.models.get_model(base), int(size or 224)


def unsupported(shape: LayerShape) -> str:
    """Why the kernels cannot compute a convolution; "" if they can."""
    images = (shape.batch, shape.in_channels, shape.height, shape.width)
    size = (shape.batch, shape.out_channels, *shape.output_size)
    return sparse24.unsupported(images, size, shape.kernel, shape.geometry)


def layer_rows(
    shape: LayerShape, device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times of one convolution's GEMMs, printed as they come."""

    def random(*size: int) -> Tensor:
        images = torch.randn(size, device=device, dtype=torch.bfloat16)
        return images.contiguous(memory_format=torch.channels_last)

    geometry, kernel = shape.geometry, shape.kernel
    size = (shape.batch, shape.out_channels, *shape.output_size)
    x, dy = random(shape.batch, shape.in_channels, shape.height, shape.width), random(*size)
    weight = random(shape.out_channels, shape.in_channels // geometry.groups, *kernel).float()
    pruned = prune_weight(weight, get_strategy("fst_w"), geometry.groups, torch.bfloat16)
    (packed,) = sparse24.pack([weight], [geometry.groups], torch.bfloat16)
    only_input = (True, False, False)
    contestants: dict[str, Functions] = {
        "output": {
            CUDNN: lambda: F.conv2d(x, pruned.output, None, *geometry),
            sparse24.BACKEND: lambda: sparse24.convolve(
                x, packed[:2], None, size, kernel, geometry
            ),
        },
        "grad_input": {
            CUDNN: lambda: gradients(dy, x, pruned.grad_input, geometry, only_input),
            sparse24.BACKEND: lambda: sparse24.input_gradient(
                dy, packed[2:], x.shape, kernel, geometry
            ),
        },
    }
    if kernel == (1, 1) and geometry.stride == (1, 1) and device.type == "cuda":
        contestants["output"]["cuSPARSELt"] = CuSparseLt(x, pruned.output)
    positions = size[0] * size[2] * size[3]
    macs = positions * shape.out_channels * weight[0].numel()
    rows = []
    for gemm, functions in contestants.items():
        with torch.no_grad():
            runnable = {n: f for n, f in functions.items() if runs(f, f"{shape} {gemm} {n}")}
            times = compare(runnable, options.repeats, device)
        for name, timing in times.items():
            rows.append(row(shape, gemm, name, timing, times[CUDNN], macs, options.peak_tflops))
    return rows


def row(
    shape: LayerShape,
    gemm: str,
    name: str,
    timing: Timing,
    dense: Timing,
    macs: int,
    peak: float,
) -> dict[str, Any]:
    """One measured time and what follows from it."""
    speed, tflops = dense.median / timing.median, 2 * macs / timing.median / 1e9
    verdict = "" if name == CUDNN else "go" if speed >= LEAST_GAIN else "no-go"
    attainable = peak if name == CUDNN else 2 * peak
    print(
        f"{shape!s:30s} {gemm:10s} {name:20s} {timing!s:30s} ms {speed:5.2f}x "
        f"{tflops:7.1f} TFLOP/s {tflops / attainable:6.1%} {verdict}",
        flush=True,
    )
    return {
        "layer": str(shape),
        "channels": min(shape.in_channels, shape.out_channels),
        "kernel": list(shape.kernel),
        "gemm": gemm,
        "contestant": name,
        **timing._asdict(),
        "speed": speed,
        "tflops": tflops,
        "share_of_peak": tflops / attainable,
        "verdict": verdict,
    }


def runs(function: Callable[[], object], name: str) -> bool:
    """Whether a contestant runs; if not, the reason is printed and the others are measured."""
    try:
        function()
    except RuntimeError as error:
        print(f"{name}: {' '.join(str(error).split())[:200]}", flush=True)
        return False
    return True


class CuSparseLt:
    """A 1x1 convolution as one sparse matrix product over all positions; searches at first."""

    def __init__(self, x: Tensor, pruned: Tensor) -> None:
        self.pruned = pruned.flatten(1).contiguous()
        self.columns = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).t()
        self.best: int | None = None

    def __call__(self) -> Tensor:
        if self.best is None:
            self.compressed = torch._cslt_compress(self.pruned)
            search = torch._cslt_sparse_mm_search
            self.best = search(self.compressed, self.columns, transpose_result=True)
        return torch._cslt_sparse_mm(
            self.compressed, self.columns, transpose_result=True, alg_id=self.best
        )


def packing_row(model: nn.Module, device: torch.device, repeats: int) -> dict[str, Any]:
    """Packing all weights of a model from float32, and a copy that moves as many bytes."""
    convolutions = [
        m
        for m in model.modules()
        if isinstance(m, nn.Conv2d) and m.in_channels // m.groups >= LEAST_CHANNELS
    ]
    weights = [
        m.weight.detach().to(device).contiguous(memory_format=torch.channels_last)
        for m in convolutions
    ]
    groups = [m.groups for m in convolutions]
    written = sum(t.nbytes for p in sparse24.pack(weights, groups, torch.bfloat16) for t in p)
    moved = sum(w.nbytes for w in weights) + written
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    functions: Functions = {
        "packing": lambda: sparse24.pack(weights, groups, torch.bfloat16),
        "copy": lambda: target.copy_(source),
    }
    times = compare(functions, repeats, device)
    share = times["copy"].median / times["packing"].median
    print(
        f"packing {len(weights)} weights, {moved / 1e6:.1f} MB: {times['packing']} ms, "
        f"{share:.1%} of the speed of a copy",
        flush=True,
    )
    return {
        "weights": len(weights),
        "bytes": moved,
        **{name: timing._asdict() for name, timing in times.items()},
        "share_of_copy": share,
    }


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of the kernel's speed over 3x3 layers from 128 channels on."""
    found: dict[str, float] = {}
    for model in dict.fromkeys(r["model"] for r in rows):
        speeds = [
            r["speed"]
            for r in rows
            if (r["model"], r["contestant"]) == (model, sparse24.BACKEND)
            and r["kernel"] == [3, 3]
            and r["channels"] >= 128
        ]
        found[model] = geometric_mean(speeds)
        print(f"{model}, 3x3 from 128 channels on: {found[model]:.2f}x")
    return found


if __name__ == "__main__":
    main()
