"""A layer's gradient maps under SDGP's rules: dense, random, magnitude, rescaled (Figure 5)."""

from __future__ import annotations

import argparse

import torch

from fst.engine.model import sparse_root
from fst.rules.masks import RESCALES
from fst.studies.analysis import plots
from fst.studies.analysis.commands.options import (
    add_layers,
    add_pattern,
    add_precision,
    add_subject,
    subject_of,
)
from fst.studies.analysis.gradients import rule_effects
from fst.studies.analysis.record import conv_names, record_step, same_draws
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.saliency import Precision
from fst.studies.arguments import amp_dtype

SHOWN = 1  # SDGP shows the second convolution


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=1, batch_size=32, needs_data=True)
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


def run(options: argparse.Namespace) -> Result:
    """Record one dense step, prune its grad_outputs under each rule."""
    subject = subject_of(options)
    model = subject.copied()
    names = conv_names(sparse_root(model), options.layers)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    loss = precision.loss_of(subject.loss, model, subject.batches[0])
    with same_draws(options.seed, subject.device):
        step = record_step(sparse_root(model), loss, scale=precision.scale)
    records = {name: record for name, record in step.layers.items() if name in names}
    if not records:
        raise ValueError("no gradient reached any of the layers.")
    shown = options.show or list(records)[min(SHOWN, len(records) - 1)]
    if shown not in records:
        raise ValueError(f"--show {shown!r} is none of: {', '.join(records)}.")
    generator = torch.Generator().manual_seed(options.seed)
    result = Result(
        f"Gradient maps, {options.n}:{options.m} along the output channels",
        f"{subject.title}; one dense training step with a batch of {options.batch_size} images in "
        f"{options.dtype}, loss scaled by {options.loss_scale:g}.",
    )
    rows = []
    for name, record in records.items():
        effects = rule_effects(record, options.n, options.m, options.rescale, generator)
        for rule, effect in effects.items():
            errors = [*effect.grad_output, *plots.error_row(effect.grad_input)]
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
    figure = plots.gradient_maps(pictures, list(channels))
    result.plots.append(Plot("Gradient maps", "gradients", caption, figure))
    return result
