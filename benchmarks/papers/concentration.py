"""Concentration of a gradient on few output positions over a training: Σ‖dY‖² in the largest.

    python benchmarks/papers/concentration.py CONFIG --batch-size 128 --batches 4 \\
        --checkpoints RUN/epoch_3.pth RUN/epoch_5.pth RUN/epoch_10.pth

The first point is the model with random weights (or of --checkpoint). ‖dY‖ is the norm over the
channels at one output position; positions of the whole batch are compared. VCAS (Wang et al., ICLR
2024) shows the like for samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from model_under_test import add_model_options, same_draws, tested_model
from paper import add_layers, drawing, main
from record import conv_names, record_step
from torch import Tensor

from fst.lab.reporting.document import Document
from fst.training.engine.model import sparse_root

PARTS = {"1/2": 2, "1/4": 4, "1/8": 8}  # of the positions


def share_in_largest(grad_output: Tensor, divisor: int) -> float:
    """The share of Σ‖dY‖² of (N, Cout, P, Q) in the 1/``divisor`` of positions of largest ‖dY‖."""
    squares = grad_output.double().square().sum(1).flatten().sort(descending=True).values
    count = -(-len(squares) // divisor)
    return float(squares[:count].sum() / squares.sum())


def shares(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Layer -> for each batch the shares of `PARTS`."""
    tested = tested_model(options)
    root = sparse_root(tested.model)
    names = conv_names(root, options.layers)
    found: dict[str, list[list[float]]] = {}
    for batch in tested.batches:
        with same_draws(options.seed, tested.device):
            step = record_step(root, lambda batch=batch: tested.loss(tested.model, batch))
        for name in names:
            if name in step.layers:
                grads = step.layers[name].calls[0].grad_output
                of_batch = [share_in_largest(grads, divisor) for divisor in PARTS.values()]
                found.setdefault(name, []).append(of_batch)
    return found


def draw(points: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """A line for each layer: the share in the upper half, at each point of the training."""
    figure = drawing(7, 4)
    axis = figure.subplots()
    for name in next(iter(points.values())):
        halves = [point[name][0] for point in points.values()]
        axis.plot(range(len(points)), halves, marker="o", markersize=3, label=name)
    axis.set_xticks(range(len(points)), list(points), fontsize=8)
    axis.set(ylabel="share of Σ‖dY‖² in the upper half of the positions")
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script's options."""
    add_model_options(parser, batches=4, batch_size=128)
    add_layers(parser, None)
    parser.add_argument(
        "--checkpoints", nargs="+", default=[], metavar="FILE", help="of later points, in order"
    )


def run(options: argparse.Namespace) -> Document:
    """Record the same batches at each point of the training."""
    points: dict[str, dict[str, list[float]]] = {}
    for checkpoint in (options.checkpoint, *options.checkpoints):
        options.checkpoint = checkpoint
        label = Path(checkpoint).stem if checkpoint else "random weights"
        points[label] = {
            name: [statistics.fmean(column) for column in zip(*found, strict=True)]
            for name, found in shares(options).items()
        }
    result = Document(
        "Where the gradient is, over a training",
        f"{options.config or options.model}: the share of Σ‖dY‖² in the output positions of "
        f"largest ‖dY‖, of whole batches of {options.batch_size} images in training mode, mean "
        f"over {options.batches} batches.",
    )
    columns = ["weights", *(f"{part}: {what}" for part in PARTS for what in ("median", "least"))]
    rows = []
    for label, layers in points.items():
        parts = list(zip(*layers.values(), strict=True))
        row = [value for part in parts for value in (statistics.median(part), min(part))]
        rows.append([label, *row])
    result.add_table("Over the layers", columns, rows)
    rows = [[label, name, *v] for label, layers in points.items() for name, v in layers.items()]
    result.add_table("Per layer", ["weights", "layer", *PARTS], rows)
    caption = "The share of Σ‖dY‖² in the half of the positions with the largest ‖dY‖."
    result.add_figure("Concentration", "concentration", caption, draw(points), options.out)
    return result


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
