"""Per layer: error and cosine of the gradients under each strategy, alone and accumulated."""

from __future__ import annotations

import argparse

from fst.engine.model import sparse_root
from fst.lab.analysis import plots
from fst.lab.analysis.approximations import parse
from fst.lab.analysis.bias import PARTS
from fst.lab.analysis.commands.options import (
    subject_of,
)
from fst.lab.analysis.errors import Error
from fst.lab.analysis.result import Plot, Result
from fst.lab.analysis.saliency import KINDS, Precision, Saliency, saliency
from fst.lab.arguments import amp_dtype

FIGURES = (
    ("relative", "relative error", True),
    ("cosine", "cosine", False),
    ("norm", "norm over the exact one", True),
)


def run(options: argparse.Namespace) -> Result:
    """Measure every approximation on the same batches."""
    approximations = [parse(text) for text in options.strategies]
    subject = subject_of(options)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    found = [
        saliency(
            subject.model,
            subject.loss,
            subject.batches,
            approximation,
            root=sparse_root,
            reference=options.reference,
            selectors=subject.selectors,
            precision=precision,
            seed=options.seed,
        )
        for approximation in approximations
    ]
    against = {
        "forward": "the dense backward pass of the same forward pass",
        "dense": "the dense model",
    }[options.reference]
    result = Result(
        "Errors of pruned gradients, layer by layer",
        f"{subject.title}; means over {options.batches} batches of {options.batch_size} images in "
        f"training mode, in {options.dtype} with the loss scaled by {options.loss_scale:g}. Exact: "
        f"{against} in float32, without weight decay of any kind. Local: one layer prunes, given "
        "the exact input and grad_output. Global: all layers prune in the same step.",
    )
    measures = ("relative error", "cosine", "norm ratio")
    result.add_table(
        "Gradient of all parameters as one vector",
        ["strategy", *measures],
        [[one.label, *one.total] for one in found],
    )
    rows = [
        [one.label, layer.name, *(value for kind in KINDS for value in _cells(layer.errors, kind))]
        for one in found
        for layer in one.layers
    ]
    parts = [f"{kind}: {measure}" for kind in KINDS for measure in measures]
    result.add_table("Per layer", ["strategy", "layer", *parts], rows)
    result.plots += [_plot(found, *figure) for figure in FIGURES]
    if options.batches > 1:
        _add_bias(result, found)
    return result


def _add_bias(result: Result, found: list[Saliency]) -> None:
    result.add_table(
        "Bias of grad_weight, all layers as one vector",
        ["strategy", "part of the kernel", "relative error", "by chance", "cosine", "gain", "±"],
        [[one.label, part, *bias] for one in found for part, bias in one.bias.items()],
        "The mean of the local grad_weight over the batches against the mean of the exact one. By "
        "chance: the relative error that so few batches leave without any bias. Gain: the share of "
        "the exact gradient that comes through in each batch, with its standard error; 1 without "
        "bias. The error of a single gradient, above, does not tell what averages out from what "
        "stays. kw: along the kernel's width; slope: (−1, 0, 1); curvature: (1, −2, 1).",
    )
    result.add_table(
        "Bias of grad_weight per layer: gain",
        ["strategy", "layer", *PARTS],
        [
            [
                one.label,
                layer.name,
                *(layer.bias[p].gain if p in layer.bias else None for p in PARTS),
            ]
            for one in found
            for layer in one.layers
        ],
    )
    figure = plots.bias(found)
    caption = (
        "Share of the exact grad_weight that comes through in each strategy's local one, with its "
        "standard error, all layers as one vector: whole, and by parts of the kernel. 1: no bias."
    )
    result.plots.append(Plot("Bias of grad_weight", "saliency_bias", caption, figure))


def _cells(errors: dict[str, Error], kind: str) -> list[float | None]:
    return list(errors.get(kind) or [None] * 3)


def _plot(found: list[Saliency], field: str, label: str, log: bool) -> Plot:
    figure = plots.saliency(found, field, label, log=log)
    caption = (
        "Layers from the first to the last. Dashed: that layer prunes alone; solid: all layers do, "
        "so that errors come in from the right."
    )
    return Plot(f"Gradients: {label}", f"saliency_{field}", caption, figure)
