"""Time convolutions, GEMM by GEMM, and training steps: strategies side by side in one run.

    python tools/benchmark.py --batch 16
    python tools/benchmark.py --model resnet50 --batch 256 --dtype bfloat16 --device cuda
    python tools/benchmark.py --config configs/detection/fst_ssd300_voc0712.py --no-layers --batch 2

Prints Markdown tables of ratios to torch's dense convolution (above 1 is faster) and of each
contestant's memory, and writes them, with all times, to OUT.md and OUT.json. The data are random.
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
from typing import Any, NamedTuple

import torch
import torchvision
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import fst
from fst import benchmark
from fst._machine import processor
from fst._text import suggest, table
from fst.benchmark import PLAIN, LayerTimes, Training, geometric_mean
from fst.engine.arguments import positive, usable_device
from fst.memory import StepMemory, measure_memory
from fst.strategy import GEMMS

DTYPES = ("float32", "bfloat16", "float16")


class Results(NamedTuple):
    """What was measured; empty what was skipped."""

    layers: list[LayerTimes]
    steps: dict[str, Any]
    memory: dict[str, StepMemory]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    wants_memory = options.device.type == "cpu" and not options.default_allocator
    keeps_memory = wants_memory and keep_freed_memory()
    try:
        training, subject = from_config(options) if options.config else from_torchvision(options)
    except (ValueError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = measure(training, options)
    header = {
        "command": shlex.join(["python", "tools/benchmark.py", *(arguments or sys.argv[1:])]),
        "device": _device_name(options.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fst": fst.__version__,
        **subject,
        "dtype": options.dtype,
        "rounds": options.repeats,
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    report = markdown(header, results, options.strategies)
    print(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(report)
    options.out.with_suffix(".json").write_text(json.dumps(as_json(header, results), indent=1))
    print(f"written: {options.out.with_suffix('.md')}, {options.out.with_suffix('.json')}")


def from_torchvision(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """A classifier of torchvision on random images, and what the report says of it."""
    height, width = options.size or (224, 224)
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    model = torchvision.models.get_model(options.model, num_classes=options.classes)
    model = model.to(options.device, memory_format=memory_format)
    images = torch.randn(options.batch, 3, height, width, device=options.device)
    images = images.contiguous(memory_format=memory_format)
    labels = torch.randint(options.classes, (options.batch,), device=options.device)

    def loss(trained: nn.Module) -> Tensor:
        return F.cross_entropy(trained(images), labels)

    subject = {
        "model": options.model,
        "batch": options.batch,
        "size": f"{height}x{width}",
        "memory_format": str(memory_format),
    }
    return Training(model, loss, amp_dtype=amp_dtype(options)), subject


def from_config(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """The model of a training config on random data, and what the report says of it."""
    from fst.engine.config import load_config
    from fst.engine.sample import sample_step, sparse_root

    config = load_config(options.config)
    step = sample_step(config, options.batch, options.size, options.device)
    sparsity = config.get("sparsity") or {}
    selection = {key: sparsity[key] for key in ("include", "exclude") if key in sparsity}
    height, width = step.batch_shape[2:]
    subject = {
        "config": options.config,
        "model": type(step.model).__name__,
        "batch": options.batch,
        "size": f"{height}x{width}, padding included",
        **selection,
        "memory_format": "as the config says",
    }
    training = Training(step.model, step.loss, sparse_root, selection, amp_dtype(options))
    return training, subject


def amp_dtype(options: argparse.Namespace) -> torch.dtype | None:
    """Autocast's type in training steps."""
    return None if options.dtype == "float32" else getattr(torch, options.dtype)


def measure(training: Training, options: argparse.Namespace) -> Results:
    """Everything that the options do not skip."""
    strategies = {name: fst.get_strategy(name) for name in options.strategies}
    layers = []
    if not options.no_layers:
        shapes = benchmark.conv_shapes(training.model, lambda: training.loss(training.model))
        layers = [
            benchmark.time_layer(
                shape,
                count,
                strategies,
                device=options.device,
                dtype=getattr(torch, options.dtype),
                memory_format=(
                    torch.channels_last if options.channels_last else torch.contiguous_format
                ),
                repeats=options.repeats,
            )
            for shape, count in track(shapes.items(), "layers", transient=True)
        ]
    if options.no_steps:
        return Results(layers, {}, {})
    repeats = max(3, options.repeats // 3)
    print(f"training steps: {repeats} rounds of {len(strategies) + 1} models …", flush=True)
    steps = benchmark.time_steps(training, strategies, repeats)
    memory = {} if options.no_memory else measure_memory(training, strategies)
    return Results(layers, steps, memory)


class Size(argparse.Action):
    """Height and width from one number or two."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if len(values) > 2:
            parser.error(f"argument {option_string}: {values} is not one number or two")
        setattr(namespace, self.dest, (values[0], values[-1]))


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
    made.add_argument(
        "--config",
        metavar="PATH",
        help="a training config instead of --model: its model, and its sparsity's include/exclude",
    )
    made.add_argument("--classes", type=positive, default=1000, help="number of classes (1000)")
    made.add_argument("--batch", type=positive, default=16, help="batch size (16)")
    made.add_argument(
        "--size",
        "--input-size",
        type=positive,
        nargs="+",
        action=Size,
        metavar=("HEIGHT", "WIDTH"),
        help="of the images; one number for squares (224; detectors: as the config resizes)",
    )
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
    made.add_argument("--no-memory", action="store_true", help="skip the training steps' memory")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/out/benchmark"),
        help="files to write, without their ending (benchmarks/out/benchmark)",
    )
    return made


def markdown(header: dict[str, Any], results: Results, strategies: list[str]) -> str:
    """The report as Markdown."""
    lines = [f"- {key}: `{value}`" for key, value in header.items()]
    layers = results.layers
    for gemm in GEMMS if layers else ():
        lines += ["", f"### {gemm}: dense time over strategy's time", ""]
        titles = ["layer", "n", "torch ms", *strategies]
        lines.append(table(titles, _ratio_rows(layers, gemm), markdown=True))
    chosen = sorted({name for layer in layers for name in layer.programs})
    if chosen:
        lines += ["", "### program of the alternating grad_weight", ""]
        rows = [[layer.shape, *(layer.programs[name] for name in chosen)] for layer in layers]
        lines.append(table(["layer", *chosen], rows, markdown=True))
    if results.steps:
        lines += ["", "### training step (forward, backward, SGD)", ""]
        lines.append(_step_table(results.steps))
    if results.memory:
        where = header["device"]
        scratch = ", without oneDNN's scratch memory" if where.startswith("CPU") else ""
        lines += ["", "### memory of a training step", "", _memory_table(results.memory), ""]
        lines += [
            "Peak: most that torch's allocator had given out at once, for parameters, gradients, "
            f"momentum, activations and temporaries{scratch}. Saved: what autograd keeps for the "
            "backward pass, parameters left out."
        ]
    return "\n".join(lines) + "\n"


def _step_table(steps: dict[str, Any]) -> str:
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
    titles = ["strategy", "ms (quartiles)", "dense time / time", "S(W) + S(Wᵀ), share of step"]
    return table(titles, rows, markdown=True)


def _memory_table(memory: dict[str, StepMemory]) -> str:
    plain = memory[PLAIN]
    rows = [
        [
            name,
            f"{used.peak / 2**20:.1f}",
            f"{used.peak / plain.peak:.3f}",
            f"{used.saved / 2**20:.1f}",
            f"{used.saved / plain.saved:.3f}",
        ]
        for name, used in memory.items()
    ]
    titles = ["strategy", "peak MiB", "peak / torch's", "saved MiB", "saved / torch's"]
    return table(titles, rows, markdown=True)


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


def as_json(header: dict[str, Any], results: Results) -> dict[str, Any]:
    """The report as plain data; times in milliseconds, memory in bytes."""

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value._asdict() for name, value in values.items()}

    return {
        "header": header,
        "layers": [
            {
                "layer": str(layer.shape),
                "count": layer.count,
                "programs": layer.programs,
                "times": {gemm: plain(times) for gemm, times in layer.times.items()},
            }
            for layer in results.layers
        ],
        "steps": {kind: plain(times) for kind, times in results.steps.items()},
        "memory": plain(results.memory),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {processor()}"


if __name__ == "__main__":
    main()
