"""Time convolutions, GEMM by GEMM, and training steps: strategies side by side in one run.

    python tools/benchmark.py --batch 16
    python tools/benchmark.py --model resnet50 --batch 256 --dtype bfloat16 --device cuda

Prints Markdown tables of ratios to torch's dense convolution (above 1 is faster) and writes them,
with all times, to OUT.md and OUT.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from rich.progress import track

import fst
from fst import benchmark
from fst._text import suggest
from fst.benchmark import PLAIN, LayerTimes, geometric_mean
from fst.strategy import GEMMS

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    device, dtype = options.device, getattr(torch, options.dtype)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    wants_memory = device.type == "cpu" and not options.default_allocator
    keeps_memory = wants_memory and keep_freed_memory()
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    strategies = {name: fst.get_strategy(name) for name in options.strategies}
    model = torchvision.models.get_model(options.model, num_classes=options.classes)
    model = model.to(device, memory_format=memory_format)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    images = images.contiguous(memory_format=memory_format)

    layers = []
    if not options.no_layers:
        shapes = benchmark.conv_shapes(model, images)
        layers = [
            benchmark.time_layer(
                shape,
                count,
                strategies,
                device=device,
                dtype=dtype,
                memory_format=memory_format,
                repeats=options.repeats,
            )
            for shape, count in track(shapes.items(), "layers", transient=True)
        ]
    steps: dict[str, Any] = {}
    if not options.no_steps:
        labels = torch.randint(options.classes, (options.batch,), device=device)
        amp_dtype = None if dtype == torch.float32 else dtype
        repeats = max(3, options.repeats // 3)
        print(f"training steps: {repeats} rounds of {len(strategies) + 1} models …", flush=True)
        steps = benchmark.time_steps(model, images, labels, strategies, repeats, amp_dtype)

    header = {
        "command": shlex.join(["python", "tools/benchmark.py", *(arguments or sys.argv[1:])]),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fst": fst.__version__,
        "model": options.model,
        "batch": options.batch,
        "size": options.size,
        "dtype": options.dtype,
        "memory_format": str(memory_format),
        "rounds": options.repeats,
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    report = markdown(header, layers, steps, list(strategies))
    print(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(report)
    options.out.with_suffix(".json").write_text(
        json.dumps(as_json(header, layers, steps), indent=1)
    )
    print(f"written: {options.out.with_suffix('.md')}, {options.out.with_suffix('.json')}")


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not an integer >= 1")
    return value


def usable_device(text: str) -> torch.device:
    """A device on which a tensor can be made."""
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error}") from error
    return torch.device(text)


def model_name(text: str) -> str:
    """A model of torchvision."""
    known = torchvision.models.list_models(module=torchvision.models)
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown.{suggest(text, known)}")
    return text


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, as jemalloc and CUDA's caching allocator do.

    Else every large tensor is paged in anew, which costs up to a third of a small layer's time and
    varies with what ran before. Returns whether it was done.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26))
    return all([mallopt(option, value) == 1 for option, value in settings])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model", type=model_name, default="resnet18", help="a torchvision classifier (resnet18)"
    )
    made.add_argument("--classes", type=positive, default=1000, help="number of classes (1000)")
    made.add_argument("--batch", type=positive, default=16, help="batch size (16)")
    made.add_argument("--size", type=positive, default=224, help="height and width (224)")
    made.add_argument(
        "--strategies",
        nargs="+",
        default=["dense", "fst", "fst_w", "srste", "sdgp"],
        choices=fst.list_strategies(),
        metavar="NAME",
        help=f"strategies to compare, of: {', '.join(fst.list_strategies())}",
    )
    made.add_argument("--dtype", choices=DTYPES, default="float32", help="of the GEMMs (float32)")
    made.add_argument(
        "--device",
        type=usable_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device (cuda where there is one)",
    )
    made.add_argument("--repeats", type=positive, default=15, help="rounds; the median counts (15)")
    made.add_argument("--threads", type=positive, help="CPU threads (torch's default)")
    made.add_argument(
        "--contiguous",
        dest="channels_last",
        action="store_false",
        help="NCHW memory instead of channels_last",
    )
    made.add_argument(
        "--default-allocator",
        action="store_true",
        help="on a CPU: let the allocator return freed memory to the system",
    )
    made.add_argument("--no-layers", action="store_true", help="skip the per-layer times")
    made.add_argument("--no-steps", action="store_true", help="skip the training steps")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/out/benchmark"),
        help="files to write, without their ending (benchmarks/out/benchmark)",
    )
    return made


def markdown(
    header: dict[str, Any],
    layers: list[LayerTimes],
    steps: dict[str, Any],
    strategies: list[str],
) -> str:
    """The report as Markdown."""
    lines = [f"- {key}: `{value}`" for key, value in header.items()]
    for gemm in GEMMS if layers else ():
        lines += ["", f"### {gemm}: dense time over strategy's time", ""]
        lines += _table(["layer", "n", "torch ms", *strategies], _ratio_rows(layers, gemm))
    chosen = {name for layer in layers for name in layer.programs}
    if chosen:
        lines += ["", "### program of the alternating grad_weight", ""]
        rows = [
            [layer.shape, *(layer.programs[name] for name in sorted(chosen))] for layer in layers
        ]
        lines += _table(["layer", *sorted(chosen)], rows)
    if steps:
        plain = steps["step"][PLAIN].median
        rows = []
        for name, timing in steps["step"].items():
            pruning = steps["pruning"].get(name)
            rows.append(
                [
                    name,
                    f"{timing.median:.1f} ({timing.low:.1f} to {timing.high:.1f})",
                    f"{plain / timing.median:.3f}",
                    f"{pruning.median / timing.median:.2%}" if pruning else "",
                ]
            )
        lines += ["", "### training step (forward, backward, SGD)", ""]
        lines += _table(
            ["strategy", "ms (quartiles)", "dense time / time", "S(W) + S(Wᵀ), share of step"], rows
        )
    return "\n".join(lines) + "\n"


def _ratio_rows(layers: list[LayerTimes], gemm: str) -> list[list[Any]]:
    rows: list[list[Any]] = []
    strategies = [name for name in layers[0].times[gemm] if name != PLAIN]
    for layer in layers:
        ratios = [f"{layer.ratio(gemm, name):.2f}" for name in strategies]
        rows.append([layer.shape, layer.count, f"{layer.times[gemm][PLAIN].median:.2f}", *ratios])
    groups = {
        "3x3, geometric mean": [x for x in layers if x.shape.kernel == (3, 3)],
        "all, geometric mean": layers,
    }
    for title, group in groups.items():
        means = [geometric_mean(layer.ratio(gemm, name) for layer in group) for name in strategies]
        rows.append([f"**{title}**", "", "", *(f"**{mean:.2f}**" for mean in means)])
    return rows


def _table(header: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def as_json(
    header: dict[str, Any], layers: list[LayerTimes], steps: dict[str, Any]
) -> dict[str, Any]:
    """The report as plain data; times in milliseconds."""

    def plain(times: dict[str, Any]) -> dict[str, Any]:
        return {name: timing._asdict() for name, timing in times.items()}

    return {
        "header": header,
        "layers": [
            {
                "layer": str(layer.shape),
                "count": layer.count,
                "programs": layer.programs,
                "times": {gemm: plain(times) for gemm, times in layer.times.items()},
            }
            for layer in layers
        ],
        "steps": {kind: plain(times) for kind, times in steps.items()},
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"CPU, {model}"


if __name__ == "__main__":
    main()
