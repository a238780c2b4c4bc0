"""Entropy of features, and what the left neighbour leaves of it (FST, Figure 4 and Eq. 11).

python benchmarks/papers/entropy.py CONFIG --checkpoint FILE --split val
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from model_under_test import ModelUnderTest, add_model_options, images_of, same_draws, tested_model
from paper import add_layers, drawing, main, name_layers, spread, visit_inputs
from record import conv_names
from torch import Tensor

from fst.basics.arguments import positive
from fst.lab.document import Document
from fst.lab.figures import COLOURS, INK
from fst.training.engine.model import sparse_root

_CHUNK = 16  # samples whose joint histograms are held at once
COUNT = 5


class SpatialEntropy(NamedTuple):
    """In bits, one number per sample.

    Attributes:
        entropy: H(X).
        conditional: H(X|X′), X′ being the left neighbour of X.
        shuffled: H(X|X′) with the neighbours dealt out at random: how far the entropy seems to
            fall merely because the joint histogram of few values is estimated too sharp.
    """

    entropy: Tensor
    conditional: Tensor
    shuffled: Tensor


def quantise(features: Tensor, levels: int = 256) -> Tensor:
    """Each sample (first axis) to integers 0 ... levels − 1: equal intervals from its minimum to
    its maximum; a constant sample becomes 0.
    """
    if levels < 2:
        raise ValueError(f"levels={levels} must be an integer >= 2.")
    flat = features.flatten(1).double()
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    span = torch.where(high > low, high - low, torch.ones_like(low))
    bins = ((flat - low) / span * levels).long().clamp_(max=levels - 1)
    return bins.view(features.shape)


def histogram_entropy(counts: Tensor) -> Tensor:
    """H = −Σ p log₂ p in bits over the last axis of ``counts``."""
    share = counts.double() / counts.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def joint_counts(first: Tensor, second: Tensor, levels: int) -> Tensor:
    """Count each pair: (samples, levels, levels) from two (samples, values)."""
    samples = len(first)
    sample = torch.arange(samples, device=first.device)[:, None]
    index = (sample * levels + first) * levels + second
    counts = torch.bincount(index.flatten(), minlength=samples * levels * levels)
    return counts.view(samples, levels, levels)


def spatial_entropy(
    features: Tensor, levels: int = 256, generator: torch.Generator | None = None
) -> SpatialEntropy:
    """H(X) and H(X|X′) of each sample of ``features`` (N, C, H, W), W >= 2.

    One histogram per sample over all its channels, after `quantise`. X are all positions that have
    a left neighbour, so that H(X) − H(X|X′) is never negative; H(X|X′) = H(X, X′) − H(X′).
    """
    if features.dim() != 4 or features.shape[3] < 2:
        raise ValueError(
            f"features have shape {tuple(features.shape)}; they must be (N, C, H, W) with W >= 2."
        )
    found = []
    for part in quantise(features, levels).split(_CHUNK):
        left, right = part[..., :-1].flatten(1), part[..., 1:].flatten(1)
        order = torch.randperm(left.shape[1], generator=generator).to(left.device)
        joint = joint_counts(left, right, levels)
        dealt = joint_counts(left[:, order], right, levels)
        entropy = histogram_entropy(joint.sum(1))
        of_left = histogram_entropy(joint.sum(2))
        conditional, shuffled = (histogram_entropy(j.flatten(1)) - of_left for j in (joint, dealt))
        found.append(torch.stack([entropy, conditional, shuffled]))
    return SpatialEntropy(*torch.cat(found, 1))


def white_noise(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian noise with the mean and the standard deviation of each channel of ``images``."""
    noise = torch.randn(images.shape, generator=generator).to(images)
    spread, centre = torch.std_mean(images, (0, 2, 3), keepdim=True)
    return noise * spread + centre


def draw(layers: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Bars of H(X) and H(X|X′) per layer, one panel per kind of input, with the chance level."""
    figure = drawing(5.2 * len(panels), 3.6)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, bits) in zip(axes, panels.items(), strict=True):
        places = range(len(layers))
        axis.bar([p - 0.2 for p in places], bits["H(X)"], 0.38, label="H(X)", color=COLOURS[0])
        axis.bar(
            [p + 0.2 for p in places], bits["H(X|X′)"], 0.38, label="H(X|X′)", color=COLOURS[1]
        )
        axis.plot(
            [p + 0.2 for p in places],
            bits["shuffled"],
            "_",
            markersize=16,
            color=INK,
            markeredgewidth=1.5,
            label="H(X|X′), neighbours shuffled",
        )
        axis.set_title(title, loc="left")
        name_layers(axis, layers)
    axes[0].set_ylabel("bits")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model_options(parser, batches=4, batch_size=32)
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


def run(options: argparse.Namespace) -> Document:
    """Measure both kinds of input."""
    tested = tested_model(options)
    model = tested.copied(tested.strategy)
    chosen = conv_names(sparse_root(model), options.layers)
    chosen = chosen if options.layers else spread(chosen, COUNT)
    panels = {
        "images": _measure(tested, model, chosen, options, noise=False),
        "white noise": _measure(tested, model, chosen, options, noise=True),
    }
    images = sum(len(images_of(batch)) for batch in tested.batches)
    result = Document(
        "Entropy of the convolutions' inputs",
        f"{tested.title}; {images} images in batches of {options.batch_size}, model in training "
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
    figure = draw(chosen, bars)
    caption = (
        "Entropy and conditional entropy of the input of convolutions (FST, Figure 4). The black "
        "mark is where H(X|X′) lies for neighbours without any similarity."
    )
    result.add_figure("Entropy of features", "entropy", caption, figure, options.out)
    return result


def _measure(
    tested: ModelUnderTest,
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

    for number, batch in enumerate(tested.batches):
        if noise:
            batch = {**batch, "inputs": white_noise(images_of(batch), generator)}
        with same_draws(options.seed + number, tested.device):
            visit_inputs(sparse_root(model), layers, lambda: tested.loss(model, batch), visit)  # noqa: B023
    missing = [layer for layer in layers if layer not in found]
    if missing:
        raise ValueError(f"layers did not run: {', '.join(missing)}.")
    return {
        name: SpatialEntropy(*(torch.cat(part) for part in zip(*parts, strict=True)))
        for name, parts in found.items()
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
