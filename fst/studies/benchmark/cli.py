"""Time layers, GEMM by GEMM and backend by backend, and training steps, eager and compiled.

    fst bench --batch 16
    fst bench --model timm:vit_small_patch16_224 --layers linear --batch 8 --no-steps
    fst bench --model resnet50 --batch 256 --dtype bfloat16 --device cuda
    fst bench --backends --no-steps --strategies fst
    fst bench --config configs/detection/fst_ssd300_voc0712.py --no-layers --batch 2

Everything is compared in one run, in turns, on random data. Prints Markdown tables: ratios to
torch's dense layer and training step (above 1 is faster), the backends chosen and why, the
share of the roofline bound, where a step's time goes, and memory. Writes them to OUT.md, with all
times to OUT.json, and as charts to OUT.png and OUT_layers.png (where matplotlib is installed).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fst.backends import registry
from fst.backends.timing import processor_time
from fst.basics.arguments import (
    add_traceback,
    positive,
    positive_number,
    usable_device,
    user_errors,
)
from fst.checkpoint import write_text_atomically
from fst.selection import LAYERS
from fst.strategies.registry import list_strategies
from fst.studies.arguments import DTYPES, command_of
from fst.studies.benchmark.measurements import Measurements, as_json, describe
from fst.studies.benchmark.run import (
    from_config,
    from_name,
    measure,
    rate_words,
    strategy_of,
)
from fst.studies.reporting.environment import surroundings
from fst.studies.reporting.markdown import markdown

CLOCKS = ("of the host", "CUDA events; the L2 cache is flushed before each call")
PROCESSOR_CLOCK = "processor time of the process: the machine was shared"
OF_MODEL = {"model": "resnet18", "layers": "conv", "classes": 1000}  # a config says these itself
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit status 1 if it was stopped."""
    options = parser().parse_args(arguments)
    with user_errors(options):
        return _benchmark(options, arguments)


def _benchmark(options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    _complete(options)
    if options.processor_time and options.device.type != "cpu":
        raise ValueError(f"--processor-time needs --device cpu, not {options.device.type!r}.")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    wants_memory = options.device.type == "cpu" and not options.default_allocator
    keeps_memory = wants_memory and keep_freed_memory()
    training, subject = from_config(options) if options.config else from_name(options)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {options.out} cannot be written: {error}") from error
    if not os.access(options.out.parent, os.W_OK):
        raise ValueError(f"--out {options.out} cannot be written: its folder is read-only.")
    header = {
        "command": command_of("bench", arguments),
        **surroundings(options.device),
        **subject,
        "dtype": options.dtype,
        "rounds": options.repeats,
        "clock": (
            PROCESSOR_CLOCK if options.processor_time else CLOCKS[options.device.type == "cuda"]
        ),
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    found = Measurements(options.device.type)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with processor_time() if options.processor_time else contextlib.nullcontext():
            measure(training, options, found)
    except KeyboardInterrupt:
        header["incomplete"] = "stopped before its end"
    if found.rates is not None:
        header.update(rate_words(found.rates, options))
    charts: list[Path] = []
    if importlib.util.find_spec("matplotlib") is not None:
        from fst.studies.benchmark.charts import draw

        charts = draw(found, options.out)
    report = markdown(describe(header, found, [chart.name for chart in charts]))
    print(report)
    written = [options.out.with_name(f"{options.out.name}.{ending}") for ending in ("md", "json")]
    write_text_atomically(report, written[0])
    write_text_atomically(json.dumps(as_json(header, found), indent=1), written[1])
    print(f"written: {', '.join(map(str, [*written, *charts]))}")
    if "incomplete" in header:
        print("stopped: what had been measured is written", file=sys.stderr)
        return 1
    return 0


def _complete(options: argparse.Namespace) -> None:
    """Give --model and what belongs to it their defaults; refuse them beside a config."""
    for name, default in OF_MODEL.items():
        if options.config and getattr(options, name) is not None:
            raise ValueError(
                f"--{name} {getattr(options, name)} is not for --config, which says it itself."
            )
        if getattr(options, name) is None:
            setattr(options, name, default)


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


def strategy_text(text: str) -> str:
    """NAME or NAME,OPTION=VALUE,...: a strategy that can be made."""
    try:
        strategy_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


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
        prog="fst bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model",
        metavar="[timm:]NAME",
        help="a classifier of torchvision, or of timm (resnet18)",
    )
    made.add_argument(
        "--layers",
        choices=LAYERS,
        help="which layers of --model are sparse and timed (conv; a config says it itself)",
    )
    made.add_argument(
        "--config",
        metavar="PATH",
        help="a training config instead of --model: its model, and its sparsity's choice of layers",
    )
    made.add_argument("--classes", type=positive, help="number of classes of --model (1000)")
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
        type=strategy_text,
        metavar="NAME",
        help="strategies to compare, with options or without (sampled,keep=4), of: "
        + ", ".join(list_strategies()),
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
        "--processor-time",
        action="store_true",
        help="on a CPU: what the process spends on its processors, not wall-clock time; with "
        "--threads 1, for a machine that others use at the same time",
    )
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
            f"--{name}",
            type=positive_number,
            help=f"of the roofline: the machine's {what} ({default})",
        )
    made.add_argument(
        "--op",
        action="store_true",
        help="instead of all else, per layer the backward pass of fst.sparse_conv2d for the weight "
        "alone, as a user calls it",
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
    add_traceback(made)
    return made
