"""Multiply-adds per layer and GEMM of a training step (FST, Figure 2)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import nn

from fst.engine.model import sparse_root
from fst.lab.analysis.commands.options import subject_of
from fst.lab.analysis.macs import LayerMacs, MacReport, count_macs, total_cell
from fst.lab.analysis.result import Plot, Result
from fst.lab.analysis.subject import Subject, same_draws
from fst.lab.arguments import named_options
from fst.lab.reporting.figures import GEMM_COLOURS, name_layers
from fst.rules.strategy import GEMMS, Strategy
from fst.strategies.registry import get_strategy

CELLS = (
    "Cells: GMAC: share in sparse GEMMs -> share left; the multiply-adds (10⁹) of dense training, "
    "which part of them lies in GEMMs with a pruned operand, and which part of all of them the "
    "strategy leaves."
)
NOTES = (
    "Counted are the GEMMs that autograd computes in this step. A frozen stage has no weight "
    "gradient; what lies below it, and the first layer, has no grad_input. Neither is in any "
    "number, dense or sparse: nobody pays for it.",
    "A layer that several feature maps share (a detector's RPN head) counts once for each of them.",
    "2:4 leaves a half. More is left where a group is short (3 input channels keep 2), in "
    "grad_weight where a row has an odd width (its last position stands alone), and all of it in "
    "1x1 maps.",
    "The counts say what a strategy leaves, not what runs faster: see `accelerated` and "
    "`simulated` in the report of a conversion.",
)


class Counted(NamedTuple):
    """A model under one strategy."""

    name: str
    batch_shape: tuple[int, ...]
    strategy: str
    macs: MacReport


def run(options: argparse.Namespace) -> Result:
    """Count one step of each config under each strategy."""
    named = {text: named_options(text) for text in options.strategies}
    rules = {text: get_strategy(name, **given) for text, (name, given) in named.items()}
    counted, titles = [], []
    for config in options.configs or [None]:
        options.config = config
        subject = subject_of(options)
        titles.append(subject.title)
        if options.all:
            subject.selectors = {"include": [nn.Conv2d, nn.Linear]}
        name = Path(config).stem if config else options.model
        own = subject.strategy or get_strategy("dense")
        for text, rule in (rules or {own.name: own}).items():
            macs = count_step(subject, rule, options.seed)
            counted.append(Counted(name, subject.batch_shape, text, macs))
    result = Result(
        "Multiply-adds per layer and GEMM",
        f"{'; '.join(titles)}; one training step with {options.batch_size} images.",
        notes=list(NOTES),
    )
    result.add_table("Convolutions", *_overview(counted), CELLS)
    for one in counted:
        title = f"{one.name}, {one.strategy}"
        result.add_table(f"{title}, by module", *one.macs.by_module())
        header, rows = one.macs.exceptions()
        if rows:
            result.add_table(f"{title}: not sparse, or not computed", header, rows)
        for what, names in (("did not run", one.macs.idle), ("not counted", one.macs.uncounted)):
            result.notes += [f"{title}, {what}: {', '.join(names)}."] if names else []
    if len(counted) == 1:
        _add_layers(result, counted[0].macs.layers)
    return result


def count_step(subject: Subject, strategy: Strategy, seed: int = 0) -> MacReport:
    """The multiply-adds of one step of the subject's model under a strategy."""
    model, skipped = subject.converted(strategy)
    with same_draws(seed, subject.device):
        return count_macs(
            sparse_root(model),
            lambda: subject.loss(model, subject.batches[0]).backward(),
            skipped,
        )


def _overview(counted: Sequence[Counted]) -> tuple[list[str], list[list[str]]]:
    columns = ["model", "batch", "strategy", *GEMMS, "three GEMMs", "with linear layers"]
    rows = [
        [
            one.name,
            "x".join(map(str, one.batch_shape)),
            one.strategy,
            *(total_cell(one.macs.total(gemm)) for gemm in (*GEMMS, None)),
            total_cell(one.macs.total(kind=None)),
        ]
        for one in counted
    ]
    return columns, rows


def _add_layers(result: Result, layers: Sequence[LayerMacs]) -> None:
    """A row for every layer, and the figure of the convolutions."""
    parts = [f"{gemm}, {what}" for gemm in GEMMS for what in ("dense", "left")]
    rows = [
        [layer.name, "x".join(map(str, layer.weight)), *_billions(layer), layer.kind]
        for layer in layers
    ]
    result.add_table("10⁹ multiply-adds", ["layer", "weight", *parts, "kind"], rows)
    drawn = [layer for layer in layers if layer.kind == "conv"]
    figure = _drawn(
        [layer.name for layer in drawn],
        {gemm: [layer.gemms[gemm].dense / 1e9 for layer in drawn] for gemm in GEMMS},
        {gemm: [layer.gemms[gemm].left / 1e9 for layer in drawn] for gemm in GEMMS},
    )
    caption = (
        "Multiply-adds of the three GEMMs of every convolution (FST, Figure 2); hatched: what the "
        "strategy drops. The first layer has no grad_input, because images need no gradient."
    )
    result.plots.append(Plot("Multiply-adds", "macs", caption, figure))


def _billions(layer: LayerMacs) -> list[float]:
    return [
        value / 1e9 for gemm in GEMMS for value in (layer.gemms[gemm].dense, layer.gemms[gemm].left)
    ]


def _drawn(
    layers: Sequence[str], dense: Mapping[str, Sequence[float]], left: Mapping[str, Sequence[float]]
) -> Figure:
    """Multiply-adds (10⁹) per layer and GEMM; what a strategy drops is hatched."""
    figure = Figure(figsize=(max(6.0, 0.42 * len(layers) + 1.5), 3.6), layout="constrained")
    axis = figure.subplots()
    for offset, gemm in zip((-0.27, 0.0, 0.27), GEMMS, strict=True):
        places = [i + offset for i in range(len(layers))]
        colour = GEMM_COLOURS[gemm]
        axis.bar(places, left[gemm], 0.25, label=gemm, color=colour)
        dropped = [d - kept for d, kept in zip(dense[gemm], left[gemm], strict=True)]
        if any(dropped):
            axis.bar(
                places,
                dropped,
                0.25,
                bottom=left[gemm],
                color="white",
                edgecolor=colour,
                hatch="////",
                linewidth=0.5,
                label=f"{gemm}, dropped",
            )
    axis.set_ylabel("multiply-adds per step (10⁹)")
    name_layers(axis, layers)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=8)
    return figure
