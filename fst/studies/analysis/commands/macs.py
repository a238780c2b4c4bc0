"""Multiply-adds per layer and GEMM of a training step (FST, Figure 2)."""

from __future__ import annotations

import argparse

from fst.engine.model import sparse_root
from fst.rules.strategy import GEMMS
from fst.studies.analysis import plots
from fst.studies.analysis.commands.options import add_subject, subject_of
from fst.studies.analysis.contestants import parse
from fst.studies.analysis.macs import LayerMacs, count_macs
from fst.studies.analysis.probe import Probe
from fst.studies.analysis.record import same_draws
from fst.studies.analysis.result import Plot, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=1, batch_size=1, needs_data=False)
    parser.add_argument(
        "--strategy",
        default="dense",
        metavar="NAME[,option=value...]",
        help="what training prunes (default: dense)",
    )


def run(options: argparse.Namespace) -> Result:
    """Count one step."""
    rule = parse(options.strategy).rule
    if isinstance(rule, Probe):
        raise ValueError(f"--strategy {options.strategy}: this is no registered strategy.")
    subject = subject_of(options)
    model = subject.copied(rule)
    with same_draws(options.seed, subject.device):
        report = count_macs(
            sparse_root(model), lambda: subject.loss(model, subject.batches[0]).backward()
        )
    layers = [layer for layer in report.layers if layer.kind == "conv"]
    result = Result(
        "Multiply-adds per layer and GEMM",
        f"{subject.title}; strategy {rule}; one training step with {options.batch_size} images.",
    )
    rows = [
        [layer.name, "x".join(map(str, layer.weight)), *_billions(layer), layer.kind]
        for layer in report.layers
    ]
    parts = [f"{gemm}, {what}" for gemm in GEMMS for what in ("dense", "left")]
    result.add_table("10⁹ multiply-adds", ["layer", "weight", *parts, "kind"], rows)
    totals = [(gemm, report.total(gemm)) for gemm in GEMMS] + [("all three", report.total())]
    whole = report.total().dense
    result.add_table(
        "Convolutions together",
        ["GEMM", "dense (10⁹)", "share of all", "left (10⁹)", "left / dense"],
        [
            [gemm, t.dense / 1e9, t.dense / whole, t.left / 1e9, t.share_left]
            for gemm, t in totals
            if t.dense
        ],
    )
    figure = plots.macs(
        [layer.name for layer in layers],
        {gemm: [layer.gemms[gemm].dense / 1e9 for layer in layers] for gemm in GEMMS},
        {gemm: [layer.gemms[gemm].left / 1e9 for layer in layers] for gemm in GEMMS},
    )
    caption = (
        "Multiply-adds of the three GEMMs of every convolution (FST, Figure 2); hatched: what the "
        "strategy drops. The first layer has no grad_input, because images need no gradient."
    )
    result.plots.append(Plot("Multiply-adds", "macs", caption, figure))
    result.notes += [f"Not counted: {', '.join(report.uncounted)}."] if report.uncounted else []
    return result


def _billions(layer: LayerMacs) -> list[float]:
    return [
        value / 1e9 for gemm in GEMMS for value in (layer.gemms[gemm].dense, layer.gemms[gemm].left)
    ]
