"""Features, their adjacent difference and their reconstruction as images (FST, Figure 5).

python benchmarks/papers/similarity.py CONFIG --checkpoint FILE --split val
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from errors import error_of
from matplotlib.figure import Figure
from model_under_test import add_model_options, same_draws, tested_model
from paper import add_layers, bare, drawing, main, spread
from record import LayerRecord, conv_names, padded_input, record_step
from torch import Tensor, nn

from fst.api.functional import sparse_conv2d
from fst.basics.arguments import positive
from fst.basics.selectors import selected
from fst.lab.document import Document
from fst.rules.alternating import Alternating
from fst.rules.strategy import Strategy
from fst.training.engine.model import sparse_root

SHOWN = (5, 10)  # FST shows the 6th and the 11th convolution


class Similarity(NamedTuple):
    """The numbers of one layer in one step.

    Attributes:
        difference: mean |X − its right neighbour| over the range of X.
        reconstruction: ‖Xʳ − X‖ / ‖X‖ of im2col(X), what Eq. 9 replaces.
        restored: relative error of grad_weight with information restoration (Eq. 10).
        dropped: relative error of grad_weight without it.
    """

    difference: float
    reconstruction: float
    restored: float
    dropped: float


def adjacent_difference(features: Tensor) -> Tensor:
    """X − its right neighbour: (..., W) -> (..., W − 1)."""
    return features[..., :-1] - features[..., 1:]


def reconstruction(features: Tensor) -> Tensor:
    """Columns 1, 3, 5, … become copies of columns 0, 2, 4, …; same shape."""
    kept = features[..., ::2]
    return kept.repeat_interleave(2, -1)[..., : features.shape[-1]]


def layer_similarity(record: LayerRecord) -> Similarity:
    """The numbers of one recorded convolution, all its calls together.

    Raises:
        ValueError: its weight needs no gradient.
    """
    layer = record.layer
    if not layer.weight.requires_grad:
        raise ValueError("the weight needs no gradient: it has no grad_weight.")
    spans, differences, columns, copies = [], [], [], []
    for call in record.calls:
        differences.append(adjacent_difference(call.input).abs().double().mean())
        spans.append((call.input.amax() - call.input.amin()).double())
        matrix = _im2col(call.input, layer, call.grad_output.shape[2:])
        columns.append(matrix)
        copies.append(reconstruction(matrix))
    difference = torch.stack(differences).mean() / torch.stack(spans).amax().clamp(min=1e-30)
    error = error_of(copies, columns).relative
    del columns, copies
    exact = grad_weight(record, Strategy("dense"))
    errors = [
        error_of([grad_weight(record, Strategy("alternating", grad_weight=rule))], [exact]).relative
        for rule in (Alternating(restore=True), Alternating(restore=False))
    ]
    return Similarity(float(difference), error, *errors)


def grad_weight(record: LayerRecord, strategy: Strategy) -> Tensor:
    """The weight gradient of the recorded calls under ``strategy``, in float32 or wider."""
    layer = record.layer
    weight = layer.weight.detach().requires_grad_()
    total = torch.zeros_like(weight)
    for call in record.calls:
        input, geometry = padded_input(layer, call.input.to(weight.dtype))
        with torch.enable_grad():
            output = sparse_conv2d(input, weight, None, *geometry, strategy)
        total += torch.autograd.grad(output, weight, call.grad_output.to(weight.dtype))[0]
    return total


def _im2col(input: Tensor, layer: nn.Conv2d, output_size: torch.Size) -> Tensor:
    """(N, Cin·kh·kw, P, Q)."""
    padded, geometry = padded_input(layer, input)
    columns = F.unfold(
        padded, layer.kernel_size, geometry.dilation, geometry.padding, geometry.stride
    )
    return columns.unflatten(2, tuple(output_size))


def _mosaic(maps: Tensor) -> Tensor:
    """As many of the maps of (C, H, W) as fill a square."""
    side = int(len(maps) ** 0.5)
    height, width = maps.shape[1:]
    tiles = maps[: side * side].reshape(side, side, height, width)
    return tiles.transpose(1, 2).reshape(side * height, side * width)


def draw(rows: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """Layer -> title -> (C, H, W): a grid of mosaics of the channels.

    Every row is scaled to [0, 1] by the range of its first image; differences by its width.
    """
    titles = list(next(iter(rows.values())))
    figure = drawing(2.7 * len(titles) + 0.8, 2.7 * len(rows) + 0.3)
    axes = figure.subplots(len(rows), len(titles), squeeze=False)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    for line, (layer, images) in zip(axes, rows.items(), strict=True):
        first = images[titles[0]]
        low, span = float(first.min()), float(first.max() - first.min()) or 1.0
        for axis, title in zip(line, titles, strict=True):
            is_difference = title == "adjacent difference"
            shown = images[title].abs() if is_difference else images[title] - low
            drawn = axis.imshow(
                _mosaic(shown / span).numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest"
            )
            bare(axis)
        line[0].set_ylabel(layer)
    figure.colorbar(drawn, ax=axes, shrink=0.6)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model_options(parser, batches=1, batch_size=16)
    parser.add_argument(
        "--show",
        nargs="+",
        metavar="PATTERN",
        help="convolutions to draw, as glob patterns (default: the 6th and the 11th, "
        "as in the paper; the first and the last of fewer)",
    )
    parser.add_argument(
        "--channels", type=positive, default=16, help="first channels to draw (default: 16)"
    )
    parser.add_argument("--image", type=int, default=0, help="image of the batch (default: 0)")
    add_layers(parser, None)


def run(options: argparse.Namespace) -> Document:
    """Record one step, draw some layers, tabulate all."""
    tested = tested_model(options)
    if not 0 <= options.image < options.batch_size:
        raise ValueError(f"--image {options.image} must be 0 to {options.batch_size - 1}.")
    model = tested.copied(tested.strategy)
    names = conv_names(sparse_root(model), options.layers)
    with same_draws(options.seed, tested.device):
        records = record_step(
            sparse_root(model), lambda: tested.loss(model, tested.batches[0])
        ).layers
    records = {name: record for name, record in records.items() if name in names}
    if not records:
        raise ValueError("no gradient reached any of the layers.")
    result = Document(
        "Similarity of neighbouring columns of features",
        f"{tested.title}; one training step with a batch of {options.batch_size} images.",
    )
    rows = [
        [name, *layer_similarity(record)]
        for name, record in records.items()
        if record.layer.weight.requires_grad
    ]
    result.add_table(
        "Per layer",
        [
            "layer",
            "mean |difference| / range",
            "error of im2col(X)ʳ",
            "error of grad_weight, restored",
            "error of grad_weight, not restored",
        ],
        rows,
        "Relative errors ‖approximate − exact‖ / ‖exact‖. im2col(X)ʳ: every second output "
        "position is replaced by its left neighbour (Eq. 9). grad_weight: with that replacement "
        "(information restoration, Eq. 10) and with the position merely dropped (Eq. 7), for the "
        "exact grad_output.",
    )
    shown = _shown(records, options.show)
    figure = draw({name: _images(record, options) for name, record in shown.items()})
    caption = (
        "Inputs of convolutions (the first channels, side by side), the difference of adjacent "
        "columns, and the reconstruction from the even columns (FST, Figure 5), scaled to [0, 1] "
        "by the range of the input."
    )
    result.add_figure(
        "Features and their reconstruction", "similarity", caption, figure, options.out
    )
    return result


def _shown(records: dict[str, LayerRecord], patterns: list[str] | None) -> dict[str, LayerRecord]:
    names = list(records)
    if patterns is None:
        is_deep = len(names) > max(SHOWN)
        chosen = [names[i] for i in SHOWN] if is_deep else spread(names, len(SHOWN))
        return {name: records[name] for name in chosen}
    chosen = selected("show", patterns, records, "convolution")
    return {name: records[name] for name in names if name in chosen}


def _images(record: LayerRecord, options: argparse.Namespace) -> dict[str, Tensor]:
    features = record.calls[0].input[options.image, : options.channels].float().cpu()
    return {
        "features": features,
        "adjacent difference": F.pad(adjacent_difference(features), (0, 1)),
        "reconstruction": reconstruction(features),
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
