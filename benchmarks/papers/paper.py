"""The command line of each script in this folder, and what several scripts measure with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from model_under_test import Batch, Loss
from torch import Tensor, nn

from fst.basics.arguments import positive
from fst.basics.values import check_number
from fst.cli.options.parsing import DTYPES
from fst.lab.document import Document, make_page
from fst.lab.figures import SMALL, style
from fst.layers.calls import LayerCall, each_call


def main(
    text: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Document],
) -> int:
    """Read the arguments, run, write the page into --out."""
    parser = argparse.ArgumentParser(description=text)
    add_arguments(parser)

    def styled(options: argparse.Namespace) -> Document:
        with style(SMALL):
            return run(options)

    return make_page(parser, styled)


def bare(axis: Axes) -> None:
    """Draw the frame of ``axis`` alone: no ticks, no grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(True)


def name_layers(axis: Axes, names: Sequence[str]) -> None:
    """A tick and a slanted name for each layer."""
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(visible=False, axis="x")


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


def add_precision(parser: argparse.ArgumentParser, what: str) -> None:
    """--dtype and --loss-scale."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help=f"autocast of {what} (default: float32)"
    )
    parser.add_argument(
        "--loss-scale",
        type=float,
        default=1.0,
        help="the loss is multiplied by it, the gradients are divided by it (default: 1)",
    )


@dataclass(frozen=True)
class Precision:
    """Precision of the approximation's step; the exact one is in the model's own dtype.

    Attributes:
        dtype: autocast's, or None for no autocast.
        scale: the loss is multiplied by it for the backward pass.
    """

    dtype: torch.dtype | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("loss_scale", self.scale, "(0, inf)")

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context to run in."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.dtype)

    def loss_of(self, loss: Loss, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
        """The loss of a model and a batch, computed like this when it is called."""
        device = next(model.parameters()).device

        def computed() -> Tensor:
            with self.autocast(device):
                return loss(model, batch)

        return computed


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

    def see(call: LayerCall) -> None:
        if call.name in names:
            visit(call.name, call.input.detach())

    with torch.no_grad(), each_call(model, (nn.Conv2d, nn.Linear), see):
        run()
