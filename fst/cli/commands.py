"""The command `fst`: one entry for training, checking, exporting and studying."""

from __future__ import annotations

import argparse
import atexit
import logging
import pkgutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fst.basics.arguments import (
    STOP_SIGNALS,
    handle_signals,
    signals_handled,
    silent_when_unread,
    stop_at_once,
    user_errors,
)
from fst.basics.extras import extra_named
from fst.basics.text import suggest, table
from fst.basics.version import __version__
from fst.cli.options import lab, library, training
from fst.cli.options.paths import check_out, check_read


class Command(NamedTuple):
    """A subcommand: "module:function" of its parsed arguments, a line about it, its parser."""

    run: str
    summary: str
    parser: Callable[[], argparse.ArgumentParser]


ENGINE, LAB = "fst.training.engine", "fst.lab"
COMMANDS = {
    "train": Command(f"{ENGINE}.cli:train", "train the model of a config", training.train),
    "test": Command(f"{ENGINE}.cli:test", "evaluate a checkpoint", training.test),
    "fold": Command(f"{ENGINE}.cli:fold", "write a checkpoint's pruned weights", training.fold),
    "verify": Command(
        "fst.cli.checks:verify", "check the N:M pattern of a file's weights", library.verify
    ),
    "export": Command(
        f"{ENGINE}.export:export", "write ONNX, .pt2 or .safetensors, checked", training.export
    ),
    "pack": Command(
        f"{ENGINE}.export:pack", "make a model faster on this CPU by its zeros", training.pack
    ),
    "ablate": Command(f"{LAB}.ablation.cli:main", "train a grid of settings and seeds", lab.ablate),
    "bench": Command(f"{LAB}.benchmark.cli:main", "time layers, steps and inference", lab.bench),
    "demo": Command(
        f"{LAB}.demo:main", "dense against sparse on cluttered digits, minutes", lab.demo
    ),
    "configs": Command(
        "fst.training.cli_configs:main",
        "list, show or copy the package's configs",
        training.configs,
    ),
    "strategies": Command(
        "fst.cli.checks:strategies", "list the strategies and their papers", library.strategies
    ),
    "env": Command("fst.cli.environment:main", "versions, devices, backends", library.env),
}
NOISE = (
    "'pin_memory' argument is set as true but no accelerator is found",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "faster_coco_eval is not installed",
    "Warning: The bbox is out of bounds",  # a drawn box ends at the border
    "Warning: The polygon is out of bounds",
)
EPILOG = """\
fst COMMAND --help explains a command. Training on several GPUs:
  torchrun --nproc-per-node=8 -m fst train CONFIG --launcher pytorch"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; exit status 2 for bad input, and what is missing in one line."""
    # Python gives up its handlers as it ends, and a late signal would replace the status.
    atexit.register(handle_signals, STOP_SIGNALS, signal.SIG_IGN)
    arguments = sys.argv[1:] if argv is None else list(argv)
    listed = table(("command", ""), ((name, command.summary) for name, command in COMMANDS.items()))
    parser = argparse.ArgumentParser(
        prog="fst",
        usage="fst COMMAND ...",
        description="N:M structured sparse training of convolutional networks in PyTorch "
        f"(not the transducers of the same name).\n\n{listed}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fst-train {__version__}")
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)
        parser.print_help()
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        parser.error(f"{name!r} is no command.{suggest(name, COMMANDS)}")
    command = COMMANDS[name]
    shown = argparse.Namespace(traceback="--traceback" in rest)
    with silent_when_unread(), user_errors(shown), extra_named(), _without_noise(), _progress(name):
        given = command.parser().parse_args(rest, argparse.Namespace(words=rest))
        check_read(given)
        if name in ("fold", "export", "pack"):
            check_out(given.out, given.checkpoint)
        with signals_handled((signal.SIGINT, signal.SIGTERM), stop_at_once):
            if command.run.startswith(ENGINE):  # whose own imports take seconds
                read = pkgutil.resolve_name("fst.training.configs:read_config")
                read(given.config, {k: v for k, v in given.cfg_options.items() if k != "epochs"})
            run = pkgutil.resolve_name(command.run)
        return run(given)


@contextmanager
def _progress(command: str) -> Iterator[None]:
    """Say on stderr what is timed, and how long it takes, where that may be minutes."""
    log, handler = logging.getLogger("fst.progress"), logging.StreamHandler()
    if command in ("bench", "pack"):
        log.setLevel(logging.INFO)
        log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Ignore warnings of libraries about what no command uses."""
    with warnings.catch_warnings():
        for text in NOISE:
            warnings.filterwarnings("ignore", text)
        yield
