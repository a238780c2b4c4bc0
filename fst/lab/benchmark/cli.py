"""Time layers, GEMM by GEMM, and training steps: on random data, in one run, in turns.

    fst bench --batch 16
    fst bench --model timm:vit_small_patch16_224 --layers linear --batch 8 --measure layers
    fst bench --model resnet50 --batch 256 --dtype bfloat16 --measure steps compiled memory
    fst bench --model fst::configs/detection/fst_ssd300_voc0712.py --batch 2 --measure steps

Prints Markdown tables: ratios to torch's dense layer and training step (above 1 is faster), the
backends chosen and why, where a step's time goes, and memory. Writes them to OUT.md, and all times
to OUT.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fst.backends import registry
from fst.backends.timing import processor_time
from fst.basics.arguments import STOPPED, add_traceback, positive, user_errors
from fst.checkpoint import write_text_atomically
from fst.command_lines.options import DTYPES, Size
from fst.environment import surroundings
from fst.lab.arguments import command_of, strategy_of
from fst.lab.benchmark.measurements import Measurements, as_json, describe
from fst.lab.benchmark.run import measure, subject
from fst.lab.reporting.markdown import markdown
from fst.selection import LAYERS
from fst.strategies.registry import list_strategies

CLOCKS = ("of the host", "CUDA events; the L2 cache is flushed before each call")
PROCESSOR_CLOCK = "processor time of the process: the machine was shared"
MEASURED = ("layers", "steps", "profile", "memory")
MEASURES = (*MEASURED, "compiled")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit status 130 if it was stopped."""
    options = parser().parse_args(arguments)
    with user_errors(options):
        return _benchmark(options, arguments)


def _benchmark(options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = options.device.type == "cuda"
    if options.measure is None:
        options.measure = [*MEASURED, *(["compiled"] if on_cuda else [])]
    if options.processor_time and on_cuda:
        raise ValueError("--processor-time is for a CPU; CUDA_VISIBLE_DEVICES= hides the GPU.")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    keeps_memory = not on_cuda and keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    training, described = subject(options)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {options.out} cannot be written: {error}") from error
    if not os.access(options.out.parent, os.W_OK):
        raise ValueError(f"--out {options.out} cannot be written: its folder is read-only.")
    header = {
        "command": command_of("bench", arguments),
        **surroundings(options.device),
        **described,
        "dtype": options.dtype,
        "rounds": options.repeats,
        "clock": PROCESSOR_CLOCK if options.processor_time else CLOCKS[on_cuda],
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    found = Measurements(options.device.type)
    try:
        with processor_time() if options.processor_time else contextlib.nullcontext():
            measure(training, options, found)
    except KeyboardInterrupt:
        header["incomplete"] = "stopped before its end"
    report = markdown(describe(header, found))
    print(report)
    written = [options.out.with_name(f"{options.out.name}.{ending}") for ending in ("md", "json")]
    write_text_atomically(report, written[0])
    write_text_atomically(json.dumps(as_json(header, found), indent=1), written[1])
    print(f"written: {', '.join(map(str, written))}")
    if "incomplete" in header:
        print("stopped: what had been measured is written", file=sys.stderr)
        return STOPPED
    return 0


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
    add = made.add_argument
    add(
        "--model",
        default="resnet18",
        metavar="NAME",
        help="a classifier of torchvision, [timm:|fst:]NAME, or a training config, PATH.py or "
        "fst::configs/... (resnet18)",
    )
    add(
        "--layers",
        choices=LAYERS,
        help="which layers of a named --model are sparse and timed (conv; a config says it itself)",
    )
    add("--batch", type=positive, default=16, help="batch size (16)")
    add(
        "--size",
        type=positive,
        nargs="+",
        action=Size,
        metavar=("HEIGHT", "WIDTH"),
        help="of the images; one number for squares (224; detectors: as the config resizes)",
    )
    add(
        "--strategies",
        nargs="+",
        default=["dense", "fst", "fst_w", "srste", "sdgp"],
        type=strategy_text,
        metavar="NAME",
        help="strategies to compare, with options or without (sampled,keep=0.25), of: "
        + ", ".join(list_strategies()),
    )
    add("--dtype", choices=DTYPES, default="float32", help="of the GEMMs (float32)")
    add(
        "--measure",
        nargs="+",
        choices=MEASURES,
        metavar="WHAT",
        help=f"of {', '.join(MEASURES)}: times of each layer; of training steps, eager; where a "
        f"step's time goes; its memory; steps with torch.compile ({' '.join(MEASURED)}; on CUDA "
        "compiled too)",
    )
    add(
        "--force-backends",
        type=backend_names,
        default={},
        metavar="OPERATION=BACKEND,...",
        help="each strategy also with these backends, verified or not, where they can compute",
    )
    add("--repeats", type=positive, default=15, help="rounds; the median counts (15)")
    add("--threads", type=positive, help="CPU threads (torch's default)")
    add(
        "--processor-time",
        action="store_true",
        help="on a CPU: what the process spends on its processors, not wall-clock time; with "
        "--threads 1, for a machine that others use at the same time",
    )
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/out/benchmark"),
        help="files to write, without their ending (benchmarks/out/benchmark)",
    )
    add_traceback(made)
    return made
