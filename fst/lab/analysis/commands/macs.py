"""Multiply-adds per layer and GEMM of a training step (FST, Figure 2)."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from fst import get_strategy
from fst.api.convert import convert
from fst.lab.analysis.macs import LayerMacs, MacReport, count_macs, total_cell
from fst.lab.model import Training, from_config, from_name
from fst.lab.reporting.document import Document
from fst.lab.reporting.figures import GEMM_COLOURS, name_layers
from fst.rules.strategy import GEMMS, Strategy

LAYERS = [nn.Conv2d, nn.Linear]  # of --all
CELLS = (
    "Cells: GMAC: share in sparse GEMMs -> share left; the multiply-adds (10⁹) of dense training, "
    "which part of them lies in GEMMs with a pruned operand, and which part of all of them the "
    "strategy leaves."
)
NOTES = (
    "Counted are the GEMMs that autograd computes in this step. A stage whose weights need no "
    "gradient has no grad_weight. The layers in front of it, and the first layer, have no "
    "grad_input. Neither GEMM is in any number, dense or sparse: nobody pays for it.",
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


def run(options: argparse.Namespace) -> Document:
    """Count one step of each config under each strategy."""
    rules = {text: get_strategy(text) for text in options.strategies}
    counted = []
    for name, training in _trainings(options).items():
        own = training.strategy or get_strategy("dense")
        for text, rule in (rules or {own.name: own}).items():
            macs = count_step(training, rule, {"include": LAYERS} if options.all else None)
            counted.append(Counted(name, training.batch_shape, text, macs))
    result = Document(
        "Multiply-adds per layer and GEMM",
        "One training step on random images, with random weights.",
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
            if names:
                result.notes.append(f"{title}, {what}: {', '.join(names)}.")
    if len(counted) == 1:
        _add_layers(result, counted[0].macs.layers, options.out)
    return result


def _trainings(options: argparse.Namespace) -> dict[str, Training]:
    """Return the models to count, by name."""
    if bool(options.configs) == (options.model is not None):
        raise ValueError("give either a config or --model, not both.")
    torch.manual_seed(0)
    batch_size, size = options.batch_size, options.size
    if options.model is None:
        return {
            Path(config).stem: from_config(config, batch_size, size, options=options.cfg_options)
            for config in options.configs
        }
    if options.cfg_options:
        raise ValueError("--cfg-options needs a config, not --model.")
    return {options.model: from_name(options.model, batch_size, size)}


def count_step(
    training: Training, strategy: Strategy, selection: Mapping[str, Any] | None = None
) -> MacReport:
    """The multiply-adds of one step under a strategy, whose masks are those of its rules.

    ``selection``: arguments of `fst.convert`, instead of the training's own.
    """
    model = copy.deepcopy(training.model).train()
    chosen = training.selection if selection is None else selection
    report = convert(training.root(model), replace(strategy, schedule=None), **chosen)
    return count_macs(training.root(model), lambda: training.loss(model).backward(), report.skipped)


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


def _add_layers(result: Document, layers: Sequence[LayerMacs], folder: Path) -> None:
    """A row for every layer, and the figure of the convolutions."""
    parts = [f"{gemm}, {what}" for gemm in GEMMS for what in ("dense", "left")]
    rows = [
        [layer.name, "x".join(map(str, layer.weight)), *_billions(layer), layer.kind]
        for layer in layers
    ]
    result.add_table("10⁹ multiply-adds", ["layer", "weight", *parts, "kind"], rows)
    figure = _drawn([layer for layer in layers if layer.kind == "conv"])
    caption = (
        "Multiply-adds of the three GEMMs of every convolution (FST, Figure 2); hatched: what the "
        "strategy drops. The first layer has no grad_input, because images need no gradient."
    )
    result.add_figure("Multiply-adds", "macs", caption, figure, folder)


def _billions(layer: LayerMacs) -> list[float]:
    return [
        value / 1e9 for gemm in GEMMS for value in (layer.gemms[gemm].dense, layer.gemms[gemm].left)
    ]


def _drawn(layers: Sequence[LayerMacs]) -> Figure:
    """Multiply-adds (10⁹) per layer and GEMM; what a strategy drops is hatched."""
    figure = Figure(figsize=(max(6.0, 0.42 * len(layers) + 1.5), 3.6), layout="constrained")
    axis = figure.subplots()
    for offset, gemm in zip((-0.27, 0.0, 0.27), GEMMS, strict=True):
        places = [i + offset for i in range(len(layers))]
        left = [layer.gemms[gemm].left / 1e9 for layer in layers]
        dropped = [
            layer.gemms[gemm].dense / 1e9 - kept for layer, kept in zip(layers, left, strict=True)
        ]
        axis.bar(places, left, 0.25, label=gemm, color=GEMM_COLOURS[gemm])
        if any(dropped):
            hatched = {"edgecolor": GEMM_COLOURS[gemm], "hatch": "////", "linewidth": 0.5}
            hatched |= {"color": "white", "label": f"{gemm}, dropped"}
            axis.bar(places, dropped, 0.25, bottom=left, **hatched)
    axis.set_ylabel("multiply-adds per step (10⁹)")
    name_layers(axis, [layer.name for layer in layers])
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=8)
    return figure
