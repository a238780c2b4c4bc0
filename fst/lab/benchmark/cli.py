"""The command `fst bench`: times layers and training steps on random data, in turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fst import get_strategy
from fst.backends import registry
from fst.backends.timing import processor_time
from fst.basics.arguments import STOPPED, TERMINATED, Terminated
from fst.basics.machine import keep_freed_memory
from fst.cli.environment import surroundings
from fst.cli.options.lab import bench
from fst.cli.options.parsing import takes
from fst.cli.options.paths import check_read
from fst.files.checkpoint import write_text_atomically
from fst.lab.arguments import command_of
from fst.lab.benchmark.inference import describe_inference, engine_versions, measure_inference
from fst.lab.benchmark.measurements import Measurements, as_json, describe
from fst.lab.benchmark.run import measure, model_under_test, plan
from fst.lab.document import markdown
from fst.lab.model import is_config

CLOCKS = ("of the host", "CUDA events; the L2 cache is flushed before each call")
OF_STEPS = ("model", "layers", "strategies", "dtype", "measure", "force_backends")
PROCESSOR_CLOCK = "processor time of the process: the machine was shared"


@takes(bench)
def main(options: argparse.Namespace) -> int:
    """Measure, print, write; exit status 130 or 143 if it was stopped."""
    if options.infer is not None:
        _refuse_options_of_steps(options)
        return _infer(options)
    if is_config(options.model):
        check_read(argparse.Namespace(config=options.model))
    for text in options.strategies:
        _check_strategy(text)
    options.force_backends = _backends(options.force_backends)
    for name in ("batch", "threads"):
        given = getattr(options, name) or [None]
        if len(given) > 1:
            raise ValueError(f"--{name} {given}: several of them are for --infer.")
        setattr(options, name, given[0])
    return _benchmark(options)


def _refuse_options_of_steps(options: argparse.Namespace) -> None:
    defaults = bench()
    for name in OF_STEPS:
        given = getattr(options, name)
        if given != defaults.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {given}: of training steps, not of --infer.")


def _infer(options: argparse.Namespace) -> int:
    if is_config(options.infer):
        check_read(argparse.Namespace(config=options.infer))
    keeps_memory = keep_freed_memory()
    _check_out(options.out)
    with processor_time() if options.processor_time else contextlib.nullcontext():
        found = measure_inference(options)
    header = {
        "command": command_of("bench", options),
        **surroundings(torch.device("cpu")),
        **engine_versions(),
        "model": options.infer,
        "clock": PROCESSOR_CLOCK if options.processor_time else CLOCKS[False],
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    report = markdown(describe_inference(header, found))
    _write(options.out, report, {"header": header, "found": [one.as_json() for one in found]})
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = options.device.type == "cuda"
    if options.processor_time and on_cuda:
        raise ValueError("--processor-time is for a CPU; CUDA_VISIBLE_DEVICES= hides the GPU.")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    keeps_memory = not on_cuda and keep_freed_memory()
    training, described = model_under_test(options)
    _check_out(options.out)
    header = {
        "command": command_of("bench", options),
        **surroundings(options.device),
        **described,
        "dtype": options.dtype,
        "clock": PROCESSOR_CLOCK if options.processor_time else CLOCKS[on_cuda],
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    print(plan(options, described), flush=True)
    found, status = Measurements(), 0
    try:
        with processor_time() if options.processor_time else contextlib.nullcontext():
            measure(training, options, found)
    except KeyboardInterrupt as stop:
        status = TERMINATED if isinstance(stop, Terminated) else STOPPED
        header["incomplete"] = "stopped before its end"
    report = markdown(describe(header, found))
    _write(options.out, report, as_json(header, found))
    if status:
        print("stopped: what had been measured is written", file=sys.stderr)
    return status


def _check_out(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error}") from error
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out {out} cannot be written: its folder is read-only.")


def _write(out: Path, report: str, data: dict[str, Any]) -> None:
    print(report)
    written = [out.with_name(f"{out.name}.{ending}") for ending in ("md", "json")]
    write_text_atomically(report, written[0])
    write_text_atomically(json.dumps(data, indent=1), written[1])
    print(f"written: {', '.join(map(str, written))}")


def _check_strategy(text: str) -> None:
    """Raise ValueError unless NAME or NAME,OPTION=VALUE,... makes a strategy."""
    try:
        get_strategy(text)
    except ValueError as error:
        raise ValueError(f"--strategies {text}: {error}") from error


def _backends(text: str) -> dict[str, str]:
    """The backends of OPERATION=BACKEND,..., which can run here."""
    try:
        names = registry.parse(text, "backends")
        with registry.force(**names):
            return names
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--force-backends {text}: {error}") from error
