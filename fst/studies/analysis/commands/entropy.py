"""Entropy of features, and what is left of it once the left neighbour is known (FST, Figure 4)."""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch

from fst.basics.arguments import positive
from fst.engine.model import sparse_root
from fst.studies.analysis import plots
from fst.studies.analysis.commands.options import add_layers, add_subject, subject_of
from fst.studies.analysis.entropy import SpatialEntropy, spatial_entropy, white_noise
from fst.studies.analysis.record import conv_names, same_draws, spread, visit_inputs
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.subject import Subject, images_of

COUNT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=4, batch_size=32, needs_data=True)
    add_layers(parser, COUNT)
    parser.add_argument(
        "--per",
        choices=("image", "batch"),
        default="image",
        help="what a histogram is taken of; that of a batch has more values, so less of the drop "
        "comes by chance (default: image)",
    )
    parser.add_argument(
        "--levels", type=positive, default=256, help="of the quantisation (default: 256, 8 bits)"
    )


def run(options: argparse.Namespace) -> Result:
    """Measure both kinds of input."""
    subject = subject_of(options)
    model = subject.copied(subject.strategy)
    chosen = conv_names(sparse_root(model), options.layers)
    chosen = chosen if options.layers else spread(chosen, COUNT)
    panels = {
        "images": _measure(subject, model, chosen, options, noise=False),
        "white noise": _measure(subject, model, chosen, options, noise=True),
    }
    images = sum(len(images_of(batch)) for batch in subject.batches)
    result = Result(
        "Entropy of the convolutions' inputs",
        f"{subject.title}; {images} images in batches of {options.batch_size}, model in training "
        f"mode. Each input is quantised uniformly to {options.levels} levels between its minimum "
        f"and its maximum, one histogram per {options.per} over all channels; means in bits. "
        "X′ is the left neighbour of X.",
    )
    rows = [
        [layer, kind, *entropies, entropies[0] - entropies[1], entropies[0] - entropies[2]]
        for layer in chosen
        for kind, found in panels.items()
        for entropies in [[float(part.mean()) for part in found[layer]]]
    ]
    columns = ["layer", "input", "H(X)", "H(X|X′)", "H(X|X′), shuffled"]
    result.add_table(
        "Entropy in bits",
        [*columns, "H(X) − H(X|X′)", "of which by chance"],
        rows,
        "Shuffled: the neighbours are dealt out at random within each input. What H(X|X′) then "
        "lacks to H(X) comes from estimating a joint histogram from few values, not from "
        "similarity.",
    )
    names = ("H(X)", "H(X|X′)", "shuffled")
    bars = {
        kind: {
            name: [float(found[layer][i].mean()) for layer in chosen]
            for i, name in enumerate(names)
        }
        for kind, found in panels.items()
    }
    figure = plots.entropies(chosen, bars)
    caption = (
        "Entropy and conditional entropy of the input of convolutions (FST, Figure 4). The black "
        "mark is where H(X|X′) lies for neighbours without any similarity."
    )
    result.plots.append(Plot("Entropy of features", "entropy", caption, figure))
    return result


def _measure(
    subject: Subject,
    model: torch.nn.Module,
    layers: list[str],
    options: argparse.Namespace,
    *,
    noise: bool,
) -> dict[str, SpatialEntropy]:
    generator = torch.Generator().manual_seed(options.seed)
    found: dict[str, list[SpatialEntropy]] = defaultdict(list)

    def visit(name: str, features: torch.Tensor) -> None:
        if options.per == "batch":
            features = features.flatten(0, 1)[None]
        found[name].append(spatial_entropy(features, options.levels, generator))

    for number, batch in enumerate(subject.batches):
        if noise:
            batch = {**batch, "inputs": white_noise(images_of(batch), generator)}
        with same_draws(options.seed + number, subject.device):
            visit_inputs(sparse_root(model), layers, lambda: subject.loss(model, batch), visit)  # noqa: B023
    missing = [layer for layer in layers if layer not in found]
    if missing:
        raise ValueError(f"layers did not run: {', '.join(missing)}.")
    return {
        name: SpatialEntropy(*(torch.cat(part) for part in zip(*parts, strict=True)))
        for name, parts in found.items()
    }
