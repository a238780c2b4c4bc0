"""The command `fst bench`: times layers and training steps on random data, in turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
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
from fst.cli.options.paths import check_read
from fst.files.checkpoint import write_text_atomically
from fst.lab.benchmark.inference import describe_inference, engine_versions, measure_inference
from fst.lab.benchmark.measurements import Measurements, describe, measure
from fst.lab.document import Document, command_of, markdown
from fst.lab.model import is_config, model_under_test

CLOCKS = ("of the host", "CUDA events; the L2 cache is flushed before each call")
OF_STEPS = ("model", "layers", "strategies", "dtype", "measure", "force_backends")
PROCESSOR_CLOCK = "processor time of the process: the machine was shared"


def main(options: argparse.Namespace) -> int:
    """Measure, print, write; exit status 130 or 143 if it was stopped."""
    infers = options.infer is not None
    (_refuse_options_of_steps if infers else _check_options_of_steps)(options)
    model = options.infer or options.model
    if is_config(model):
        check_read(argparse.Namespace(config=model))
    on_cuda = not infers and torch.cuda.is_available()
    options.device = torch.device("cuda" if on_cuda else "cpu")
    if options.processor_time and on_cuda:
        raise ValueError("--processor-time is for a CPU; CUDA_VISIBLE_DEVICES= hides the GPU.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.out.parent).close()  # an error now, not after minutes
    keeps_memory = not on_cuda and keep_freed_memory()
    header = {
        "command": command_of("bench", options),
        **surroundings(options.device),
        "clock": PROCESSOR_CLOCK if options.processor_time else CLOCKS[on_cuda],
        "allocator": "freed memory is kept" if keeps_memory else "default",
    }
    with processor_time() if options.processor_time else contextlib.nullcontext():
        return (_infer if infers else _steps)(options, header)


def _refuse_options_of_steps(options: argparse.Namespace) -> None:
    defaults = bench()
    for name in OF_STEPS:
        given = getattr(options, name)
        if given != defaults.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {given}: of training steps, not of --infer.")


def _check_options_of_steps(options: argparse.Namespace) -> None:
    """Check the options; batch and threads become one number, backends a dict."""
    for text in options.strategies:
        try:
            get_strategy(text)
        except ValueError as error:
            raise ValueError(f"--strategies {text}: {error}") from error
    try:
        backends = registry.parse(options.force_backends, "backends")
        with registry.force(**backends):
            options.force_backends = backends
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--force-backends {options.force_backends}: {error}") from error
    for name in ("batch", "threads"):
        given = getattr(options, name) or [None]
        if len(given) > 1:
            raise ValueError(f"--{name} {given}: several of them are for --infer.")
        setattr(options, name, given[0])
    if options.threads:
        torch.set_num_threads(options.threads)


def _infer(options: argparse.Namespace, header: dict[str, Any]) -> int:
    found = measure_inference(options)
    header |= {**engine_versions(), "model": options.infer}
    document = describe_inference(header, found)
    _write(options.out, document, {"header": header, "found": [one.as_json() for one in found]})
    return 0


def _steps(options: argparse.Namespace, header: dict[str, Any]) -> int:
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    training, described = model_under_test(options)
    header |= {**described, "dtype": options.dtype}
    print(
        f"{options.model}, batch {options.batch}, {described['size']}, {options.dtype}, "
        f"{options.device.type}: times of {', '.join(options.measure)}, torch and "
        f"{', '.join(options.strategies)}",
        flush=True,
    )
    found, status = Measurements(), 0
    try:
        measure(training, options, found)
    except KeyboardInterrupt as stop:
        status = TERMINATED if isinstance(stop, Terminated) else STOPPED
        header["incomplete"] = "stopped before its end"
        print("stopped: what had been measured is written", file=sys.stderr)
    _write(options.out, describe(header, found), {"header": header, **found.as_json()})
    return status


def _write(out: Path, document: Document, data: dict[str, Any]) -> None:
    print(report := markdown(document))
    written = [out.with_name(f"{out.name}.{ending}") for ending in ("md", "json")]
    write_text_atomically(report, written[0])
    write_text_atomically(json.dumps(data, indent=1), written[1])
    print(f"written: {', '.join(map(str, written))}")
