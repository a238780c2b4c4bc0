"""Features, their adjacent difference and their reconstruction as images (FST, Figure 5)."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.arguments import positive
from fst.engine.model import sparse_root
from fst.selection import classifier_heads
from fst.studies.analysis import plots
from fst.studies.analysis.commands.options import add_layers, add_subject, subject_of
from fst.studies.analysis.record import (
    LayerRecord,
    conv_names,
    record_step,
    same_draws,
    spread,
    visit_inputs,
)
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.similarity import (
    adjacent_difference,
    layer_similarity,
    neighbours,
    reconstruction,
)
from fst.studies.analysis.subject import Subject

SHOWN = (5, 10)  # FST shows the 6th and the 11th convolution


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=1, batch_size=16, needs_data=True)
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


def run(options: argparse.Namespace) -> Result:
    """Record one step, draw some layers, tabulate all."""
    subject = subject_of(options)
    if not 0 <= options.image < options.batch_size:
        raise ValueError(f"--image {options.image} must be 0 to {options.batch_size - 1}.")
    model = subject.copied(subject.strategy)
    names = conv_names(sparse_root(model), options.layers)
    with same_draws(options.seed, subject.device):
        records = record_step(
            sparse_root(model), lambda: subject.loss(model, subject.batches[0])
        ).layers
    records = {name: record for name, record in records.items() if name in names}
    if not records:
        raise ValueError("no gradient reached any of the layers.")
    result = Result(
        "Similarity of neighbouring columns of features",
        f"{subject.title}; one training step with a batch of {options.batch_size} images.",
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
    result.add_table(
        "Neighbouring positions against any two",
        ["layer", "kind", "positions", "in sequence", "within rows", "within columns"],
        _neighbour_rows(subject, model, options),
        "Mean |difference| of the inputs of neighbouring positions over that of any two positions "
        "of the same map and channel: 1 where neighbours are no more alike. In sequence: pixels "
        "row by row, tokens in their order, a class token in front; rows and columns of tokens "
        "are those of the grid of patches.",
    )
    shown = _shown(records, options.show)
    figure = plots.features({name: _images(record, options) for name, record in shown.items()})
    caption = (
        "Inputs of convolutions (the first channels, side by side), the difference of adjacent "
        "columns, and the reconstruction from the even columns (FST, Figure 5), scaled to [0, 1] "
        "by the range of the input."
    )
    result.plots.append(Plot("Features and their reconstruction", "similarity", caption, figure))
    return result


def _neighbour_rows(
    subject: Subject, model: nn.Module, options: argparse.Namespace
) -> list[list[object]]:
    """Convolutions that are analysed, and linear layers but the heads, by their first call."""
    root = sparse_root(model)
    modules = dict(root.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    if options.layers is not None:
        linear = {n for n in linear if any(fnmatchcase(n, p) for p in options.layers)}
    names = [*conv_names(root, options.layers), *(linear - classifier_heads(root))]
    found: dict[str, list[object]] = {}

    def visit(name: str, input: Tensor) -> None:
        if name in found or input.dim() < 3:
            return
        kind = "linear" if name in linear else "conv"
        numbers = neighbours(input, channels_last=kind == "linear")
        if numbers is not None:
            found[name] = [name, kind, *("" if n is None else n for n in numbers)]

    with same_draws(options.seed, subject.device):
        visit_inputs(root, names, lambda: subject.loss(model, subject.batches[0]), visit)
    return [found[name] for name in modules if name in found]


def _shown(records: dict[str, LayerRecord], patterns: list[str] | None) -> dict[str, LayerRecord]:
    names = list(records)
    if patterns is None:
        is_deep = len(names) > max(SHOWN)
        chosen = [names[i] for i in SHOWN] if is_deep else spread(names, len(SHOWN))
        return {name: records[name] for name in chosen}
    matched = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    if not matched:
        raise ValueError(f"--show {patterns} matches none of: {', '.join(names)}.")
    return {name: records[name] for name in matched}


def _images(record: LayerRecord, options: argparse.Namespace) -> dict[str, Tensor]:
    features = record.calls[0].input[options.image, : options.channels].float().cpu()
    return {
        "features": features,
        "adjacent difference": F.pad(adjacent_difference(features), (0, 1)),
        "reconstruction": reconstruction(features),
    }
