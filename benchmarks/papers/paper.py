"""The command line of each script in this folder, and what several scripts measure with."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from fst.basics.arguments import add_traceback, positive, user_errors
from fst.command_lines.analyze import add_output
from fst.lab.analysis.result import Result
from fst.lab.reporting.figures import SMALL, style


def main(
    text: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Result],
) -> int:
    """Read the arguments, run, write the result into --out and print where it lies."""
    parser = argparse.ArgumentParser(description=text)
    add_arguments(parser)
    add_output(parser, Path(sys.argv[0]).stem)
    add_traceback(parser)
    options = parser.parse_args()
    with user_errors(options), style(SMALL):
        written = run(options).save(options.out, shlex.join(["python", *sys.argv]))
    print("\n".join(f"written: {path}" for path in written))
    return 0


def bare(axis: Axes) -> None:
    """Draw the frame of ``axis`` alone: no ticks, no grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(True)


def add_layers(parser: argparse.ArgumentParser, count: int | None) -> None:
    """Which convolutions."""
    default = "all" if count is None else f"{count} evenly spaced ones"
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="PATTERN",
        help=f"convolutions, as glob patterns on their names (default: {default})",
    )


def add_pattern(parser: argparse.ArgumentParser) -> None:
    """--n and --m."""
    parser.add_argument("--n", type=positive, default=2, help="kept per group (default: 2)")
    parser.add_argument("--m", type=positive, default=4, help="group size (default: 4)")


def drawing(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def spread(names: Sequence[str], count: int) -> list[str]:
    """At most ``count`` of ``names``, evenly spaced from the first to the last; count >= 1."""
    if count >= len(names):
        return list(names)
    steps = max(count - 1, 1)
    return [names[round(i * (len(names) - 1) / steps)] for i in range(count)]


def visit_inputs(
    model: nn.Module,
    names: Sequence[str],
    run: Callable[[], object],
    visit: Callable[[str, Tensor], None],
) -> None:
    """Call ``visit(name, input)`` for each call of the named layers during ``run()``."""
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: visit(name, inputs[0].detach())
        )
        for name in names
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
