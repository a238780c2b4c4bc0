"""Time convolutions, GEMM by GEMM and backend by backend, and training steps, eager and compiled.

    python tools/benchmark.py --batch 16
    python tools/benchmark.py --model resnet50 --batch 256 --dtype bfloat16 --device cuda
    python tools/benchmark.py --backends --no-steps --strategies fst
    python tools/benchmark.py --config configs/detection/fst_ssd300_voc0712.py --no-layers --batch 2

Everything is compared in one run, in turns, on random data. Prints Markdown tables: ratios to
torch's dense convolution and training step (above 1 is faster), the backends chosen and why, the
share of the roofline bound, where a step's time goes, and memory. Writes them to OUT.md, with all
times to OUT.json, and as charts to OUT.png and OUT_layers.png (where matplotlib is installed).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fst
from fst.backends import registry
from fst.basics.arguments import positive, usable_device
from fst.basics.text import suggest
from fst.studies import benchmark
from fst.studies.benchmark import machine, roofline
from fst.studies.benchmark.breakdown import break_down
from fst.studies.benchmark.memory import measure_memory
from fst.studies.benchmark.report import Results, as_json, markdown
from fst.studies.benchmark.roofline import Rates
from fst.studies.benchmark.steps import Training

CLOCKS = ("of the host", "CUDA events; the L2 cache is flushed before each call")
DTYPES = ("float32", "bfloat16", "float16")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


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
    except (ValueError, FileNotFoundError, ImportError) as error:
        command_line.error(str(error))
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        command_line.error(f"--out {options.out} cannot be written: {error}")
    if not os.access(options.out.parent, os.W_OK):
        command_line.error(f"--out {options.out} cannot be written: its folder is read-only")
    header = {
        "command": shlex.join(["python", "tools/benchmark.py", *(arguments or sys.argv[1:])]),
        **machine.describe(options.device),
        **subject,
        "dtype": options.dtype,
        "rounds": options.repeats,
        "clock": CLOCKS[options.device.type == "cuda"],
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    results = Results(options.device.type)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(training, options, results)
    except KeyboardInterrupt:
        header["incomplete"] = "stopped before its end"
    if results.rates is not None:
        header.update(rate_words(results.rates, options))
    charts: list[Path] = []
    if importlib.util.find_spec("matplotlib") is not None:
        from fst.studies.benchmark.charts import draw

        charts = draw(results, options.out)
    report = markdown(header, results, [chart.name for chart in charts])
    print(report)
    written = [options.out.with_name(f"{options.out.name}.{ending}") for ending in ("md", "json")]
    written[0].write_text(report)
    written[1].write_text(json.dumps(as_json(header, results), indent=1))
    print(f"written: {', '.join(map(str, [*written, *charts]))}")
    if "incomplete" in header:
        sys.exit("stopped: what had been measured is written")


def from_torchvision(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """A classifier of torchvision on random images, and what the report says of it."""
    import torchvision

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


def measure(training: Training, options: argparse.Namespace, results: Results) -> None:
    """Add everything that the options do not skip to ``results``."""
    strategies = {name: fst.get_strategy(name) for name in options.strategies}
    if not options.no_layers:
        time_layers(training, options, strategies, results)
    if options.no_steps:
        return
    wanted = options.device.type == "cuda" if options.compile is None else options.compile
    compiled = options.compile_mode if wanted else None
    steps = "eager and compiled" if compiled else "eager"
    repeats = max(3, options.repeats // 3)
    print(
        f"training steps: {repeats} rounds of {1 + len(strategies)} models, {steps} …", flush=True
    )
    made = benchmark.contestants(
        training, strategies, compile_mode=compiled, forced=options.force_backends
    )
    results.steps = benchmark.time_steps(made, training, repeats)
    if not options.no_profile:
        spent = {name: break_down(c, options.device) for name, c in made.ready.items()}
        results.breakdown.update(spent)
    if not options.no_memory:
        del made
        results.memory.update(measure_memory(training, strategies))


def time_layers(
    training: Training,
    options: argparse.Namespace,
    strategies: dict[str, fst.Strategy],
    results: Results,
) -> None:
    """The times of each distinct convolution and their bounds."""
    dtype = getattr(torch, options.dtype)
    measured = roofline.measure_rates(options.device, dtype)
    results.rates = Rates(
        options.tflops * 1e12 if options.tflops else measured.dense,
        options.bandwidth * 1e12 if options.bandwidth else measured.bandwidth,
        options.sparse_tflops * 1e12 if options.sparse_tflops else None,
    )
    tried = {}
    if options.backends or options.all_backends or options.force_backends:
        named = options.force_backends
        tried = benchmark.runnable_backends(named, unverified=options.all_backends)
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    shapes = benchmark.conv_shapes(training.model, lambda: training.loss(training.model))
    for index, (shape, count) in enumerate(shapes.items(), 1):
        print(f"layer {index} of {len(shapes)}: {shape} …", file=sys.stderr, flush=True)
        times = benchmark.time_layer(
            shape,
            count,
            strategies,
            device=options.device,
            dtype=dtype,
            memory_format=memory_format,
            repeats=options.repeats,
            tried=tried,
            forced=options.force_backends,
        )
        results.layers.append(times)
        results.bounds.append(roofline.layer_bounds(times, strategies, dtype, results.rates))


def rate_words(rates: Rates, options: argparse.Namespace) -> dict[str, str]:
    """What the report says of the machine's rates, and where they are from."""

    def rate(value: float, unit: str, given: float | None, measured_with: str) -> str:
        text = f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"
        return f"{text}, {'given' if given else f'measured with {measured_with}'}"

    matmul = f"a large matrix product in {options.dtype}"
    sparse = "none given: the dense rate"
    if rates.sparse is not None:
        sparse = rate(rates.sparse, "FLOP/s", options.sparse_tflops, "")
    return {
        "dense rate": rate(rates.dense, "FLOP/s", options.tflops, matmul),
        "sparse rate": sparse,
        "bandwidth": rate(rates.bandwidth, "B/s", options.bandwidth, "a large copy"),
    }


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
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown.{suggest(text, known)}")
    return text


def rate(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def backend_names(text: str) -> dict[str, str]:
    """OPERATION=BACKEND,...: backends that can run here."""
    try:
        names = registry.parse(text, "backends")
        with registry.force(**names):
            return names
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
    made.add_argument(
        "--backends",
        action="store_true",
        help="per layer, also time the verified backends that were not chosen",
    )
    made.add_argument(
        "--force-backends",
        type=backend_names,
        default={},
        metavar="OPERATION=BACKEND,...",
        help="--backends, these included and all together, even unverified; and eager training "
        "steps of each strategy with them, wherever they can compute",
    )
    made.add_argument(
        "--all-backends",
        action="store_true",
        help="--backends, and also all unverified ones that can run here",
    )
    made.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="training steps also with torch.compile, in one graph (on for cuda, off for cpu)",
    )
    made.add_argument(
        "--compile-mode",
        choices=COMPILE_MODES,
        default="default",
        help="of torch.compile (default)",
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
    for name, what in (
        ("tflops", "dense TFLOP/s"),
        ("sparse-tflops", "TFLOP/s of a GEMM with a 2:4 operand, its zeros counted"),
        ("bandwidth", "TB/s, read and written"),
    ):
        default = "as dense" if name == "sparse-tflops" else "measured in the same run"
        made.add_argument(
            f"--{name}", type=rate, help=f"of the roofline: the machine's {what} ({default})"
        )
    made.add_argument("--no-layers", action="store_true", help="skip the per-layer times")
    made.add_argument("--no-steps", action="store_true", help="skip the training steps")
    made.add_argument(
        "--no-profile", action="store_true", help="skip where the training steps' time goes"
    )
    made.add_argument("--no-memory", action="store_true", help="skip the training steps' memory")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/out/benchmark"),
        help="files to write, without their ending (benchmarks/out/benchmark)",
    )
    return made


if __name__ == "__main__":
    main()
