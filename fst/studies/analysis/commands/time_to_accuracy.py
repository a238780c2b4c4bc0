"""Accuracy over training time, measured and projected, from work dirs (SDGP, Figure 10)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fst.engine.config import read_sparsity
from fst.rules.strategy import GEMMS
from fst.studies.analysis import plots
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.runtime import gemm_shares
from fst.studies.analysis.time_to_accuracy import (
    EQUAL_SHARES,
    TimedCurve,
    projected,
    projection_factor,
    read_pace,
    simulated_densities,
)
from fst.studies.reporting.runs import read_run

METRICS = ("accuracy/top1", "coco/bbox_mAP", "pascal_voc/mAP")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("runs", nargs="+", type=Path, help="work dirs of `fst train`")
    parser.add_argument(
        "--metric", help=f"of the validation (default: the first found of {', '.join(METRICS)})"
    )
    parser.add_argument("--target", type=float, help="also tabulate the time to reach this value")
    parser.add_argument(
        "--benchmark",
        type=Path,
        help="JSON of `fst bench`, from which each GEMM's share of a step is taken "
        "(default: one third each, SDGP's assumption)",
    )


def run(options: argparse.Namespace) -> Result:
    """Read the runs, project where nothing was accelerated."""
    shares = EQUAL_SHARES
    if options.benchmark:
        shares = gemm_shares(json.loads(options.benchmark.read_text(encoding="utf-8")))
    curves: list[TimedCurve] = []
    factors = []
    for folder in options.runs:
        log = read_run(folder)
        metric = options.metric or next((m for m in METRICS if m in log.validation), None)
        if metric not in log.validation:
            known = ", ".join(log.validation) or "nothing"
            raise ValueError(f"{folder}: no metric {metric or METRICS}; it has: {known}.")
        values = log.validation[metric]
        pace = read_pace(folder, by_epoch=log.x_label == "epoch")
        curve = TimedCurve(
            folder.name, "measured", tuple(pace.seconds_at(list(values))), tuple(values.values())
        )
        strategy, choice = read_sparsity(log.config)
        densities = simulated_densities(strategy, choice.get("plan"))
        factor = projection_factor(densities, shares)
        factors.append(
            [
                folder.name,
                strategy.name if strategy else "dense",
                ", ".join(densities) or "none",
                factor,
            ]
        )
        curves.append(curve)
        if densities:
            curves.append(projected(curve, factor))
    result = Result(
        "Time to accuracy",
        "Training time without validation. Measured: as the runs logged it. Projected, for runs "
        "that prune GEMMs for which there is no kernel here: measured · (1 − Σ share(g) · (1 − "
        "density(g))) over those GEMMs g, as in SDGP; a 2:4 GEMM is taken to be twice as fast. "
        "Shares of a dense step: "
        + ", ".join(f"{gemm} {shares[gemm]:.1%}" for gemm in GEMMS)
        + (f" ({options.benchmark})." if options.benchmark else " (assumed: one third each)."),
    )
    columns = ["run", "time is", "last value", "best value", "seconds in all"]
    rows = [[c.label, c.kind, c.values[-1], max(c.values), c.seconds[-1]] for c in curves]
    if options.target is not None:
        columns.append(f"seconds to {options.target:g}")
        rows = [[*row, c.time_to(options.target)] for row, c in zip(rows, curves, strict=True)]
    result.add_table(f"{metric} over time", columns, rows)
    result.add_table(
        "Projection", ["run", "strategy", "GEMMs pruned without kernel", "factor"], factors
    )
    figure = plots.time_to_accuracy(curves, metric, options.target)
    caption = "Solid: measured; dashed: projected by SDGP's rule (SDGP, Figure 10)."
    result.plots.append(Plot("Time to accuracy", "time_to_accuracy", caption, figure))
    return result
