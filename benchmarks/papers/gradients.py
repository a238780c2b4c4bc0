"""A layer's gradient maps under SDGP's rules: dense, random, magnitude, rescaled (Figure 5).

python benchmarks/papers/gradients.py CONFIG --checkpoint FILE --batch-size 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import torch
from errors import Error, error_of
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from model_under_test import add_model_options, same_draws, tested_model
from paper import Precision, add_layers, add_pattern, add_precision, bare, drawing, main
from record import LayerRecord, conv_names, record_step
from torch import Tensor, nn

from fst.lab.document import Document
from fst.lab.model import amp_dtype
from fst.ops.prune import prune_grad_output
from fst.rules.masks import RESCALES
from fst.rules.nm import NM
from fst.training.engine.model import sparse_root

RULES = ("dense", "random", "magnitude", "magnitude_rescaled")
SHOWN = 1  # SDGP shows the second convolution
ZERO_COLOUR = "#D00000"


@dataclass(frozen=True)
class RuleEffect:
    """The effect of a rule on the grad_output of one call.

    Attributes:
        maps: the pruned grad_output (N, Cout, P, Q).
        zeros: share of exact zeros.
        l1: its L1 norm over that of the dense one; 1 if both are 0.
        grad_output, grad_input: errors against the dense ones (None where the layer's input needs
            no gradient).
    """

    maps: Tensor
    zeros: float
    l1: float
    grad_output: Error
    grad_input: Error | None


def rule_effects(
    record: LayerRecord,
    n: int = 2,
    m: int = 4,
    rescale: str = "sample_channel",
    generator: torch.Generator | None = None,
) -> dict[str, RuleEffect]:
    """`RuleEffect` of each of `RULES` on the layer's first call, pruned n:m along the channels."""
    layer, call = record.layer, record.calls[0]
    dense = call.grad_output
    exact = call.grad_input
    mass = float(dense.abs().double().sum())
    effects = {}
    for name in RULES:
        pruned = dense
        if name != "dense":
            rule = NM("grad_output", n, m, rule=name, rescale=rescale)
            pruned = prune_grad_output(dense, rule, "grad_input", layer.groups, generator)
        found = None
        if exact is not None:
            reached = [grad_input(layer, call.input, gradient) for gradient in (pruned, dense)]
            found = error_of(reached[:1], reached[1:])
        kept = float(pruned.abs().double().sum())
        effects[name] = RuleEffect(
            pruned,
            float((pruned == 0).double().mean()),
            kept / mass if mass else 1.0,
            error_of([pruned], [dense]),
            found,
        )
    return effects


def grad_input(layer: nn.Conv2d, input: Tensor, grad_output: Tensor) -> Tensor:
    """Wᵀ·dY with the layer's dense weight, whatever its strategy is."""
    weight = layer.weight.detach()
    with torch.enable_grad():
        needed = input.detach().to(weight.dtype).clone().requires_grad_()
        output = nn.Conv2d._conv_forward(layer, needed, weight, None)
    return torch.autograd.grad(output, needed, grad_output.to(output.dtype))[0]


def draw(rows: Mapping[str, Tensor], channels: Sequence[int]) -> Figure:
    """Rule -> grad_output (C, P, Q): one column per channel; exact zeros are red."""
    figure = drawing(1.7 * len(channels) + 1.4, 1.65 * len(rows) + 0.5)
    axes = figure.subplots(len(rows), len(channels), squeeze=False)
    limit = float(next(iter(rows.values()))[list(channels)].abs().max()) or 1.0
    colours = matplotlib.colormaps["gray"].with_extremes(bad=ZERO_COLOUR)
    scale = Normalize(-limit, limit)
    for axis, channel in zip(axes[0], channels, strict=True):
        axis.set_title(f"channel {channel}")
    for line, (rule, maps) in zip(axes, rows.items(), strict=True):
        for axis, channel in zip(line, channels, strict=True):
            shown = maps[channel].float()
            drawn = axis.imshow(
                shown.masked_fill(shown == 0, float("nan")).numpy(),
                cmap=colours,
                norm=scale,
                interpolation="nearest",
            )
            bare(axis)
        line[0].set_ylabel(rule.replace("_", "\n"))
    figure.colorbar(drawn, ax=axes, shrink=0.6, label="grad_output (red: exactly 0)")
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model_options(parser, batches=1, batch_size=32)
    add_layers(parser, None)
    add_pattern(parser)
    add_precision(parser, "the training step")
    parser.add_argument(
        "--rescale", choices=RESCALES, default=RESCALES[0], help=f"(default: {RESCALES[0]})"
    )
    parser.add_argument("--show", metavar="LAYER", help="layer to draw (default: the second)")
    parser.add_argument("--image", type=int, default=0, help="image of the batch (default: 0)")
    parser.add_argument(
        "--group", type=int, default=0, help="group of m channels to draw (default: 0)"
    )


def run(options: argparse.Namespace) -> Document:
    """Record one dense step, prune its grad_outputs under each rule."""
    tested = tested_model(options)
    model = tested.copied()
    names = conv_names(sparse_root(model), options.layers)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    loss = precision.loss_of(tested.loss, model, tested.batches[0])
    with same_draws(options.seed, tested.device):
        step = record_step(sparse_root(model), loss, scale=precision.scale)
    records = {name: record for name, record in step.layers.items() if name in names}
    if not records:
        raise ValueError("no gradient reached any of the layers.")
    shown = options.show or list(records)[min(SHOWN, len(records) - 1)]
    if shown not in records:
        raise ValueError(f"--show {shown!r} is none of: {', '.join(records)}.")
    generator = torch.Generator().manual_seed(options.seed)
    result = Document(
        f"Gradient maps, {options.n}:{options.m} along the output channels",
        f"{tested.title}; one dense training step with a batch of {options.batch_size} images in "
        f"{options.dtype}, loss scaled by {options.loss_scale:g}.",
    )
    rows = []
    for name, record in records.items():
        effects = rule_effects(record, options.n, options.m, options.rescale, generator)
        for rule, effect in effects.items():
            errors = [*effect.grad_output, *(effect.grad_input or [None] * 3)]
            rows.append([name, rule, effect.zeros, effect.l1, *errors])
        if name == shown:
            maps = {rule: effect.maps for rule, effect in effects.items()}
    parts = [
        f"{gradient}: {what}"
        for gradient in ("grad_output", "grad_input")
        for what in ("relative error", "cosine", "norm ratio")
    ]
    result.add_table(
        "Effect of each rule",
        ["layer", "rule", "zeros", "L1 / dense", *parts],
        rows,
        "grad_input: Wᵀ·P(dY) against Wᵀ·dY, for this layer alone. Norm ratio: the L2 norm over "
        "the dense one.",
    )
    channels = range(maps["dense"].shape[1])[options.group * options.m :][: options.m]
    if not channels or not 0 <= options.image < len(maps["dense"]):
        raise ValueError(f"--group {options.group} or --image {options.image} is out of range.")
    pictures = {rule: pruned[options.image].float().cpu() for rule, pruned in maps.items()}
    caption = (
        f"grad_output of {shown} in {options.m} neighbouring channels, dense and pruned "
        f"{options.n}:{options.m} (SDGP, Figure 5). Red: exactly 0."
    )
    figure = draw(pictures, list(channels))
    result.add_figure("Gradient maps", "gradients", caption, figure, options.out)
    return result


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
