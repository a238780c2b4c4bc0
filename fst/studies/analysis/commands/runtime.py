"""Time per layer and GEMM under each strategy (SDGP, Figure 9)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fst.rules.strategy import GEMMS
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.runtime import layer_runtimes, totals
from fst.studies.reporting.figures import gemm_bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("report", type=Path, help="JSON file that `fst bench` has written")
    parser.add_argument(
        "--strategies", nargs="+", metavar="NAME", help="of the report's (default: all)"
    )


def run(options: argparse.Namespace) -> Result:
    """Draw and sum up what was measured."""
    report = json.loads(options.report.read_text(encoding="utf-8"))
    layers = layer_runtimes(report)
    known = list(layers[0].times)
    names = options.strategies or known
    for name in names:
        if name not in known:
            raise ValueError(f"--strategies {name!r} is not in the report: {', '.join(known)}.")
    header = report.get("header", {})
    result = Result(
        "Runtime per layer and GEMM",
        "Measured by `"
        + str(header.get("command", options.report))
        + "`: "
        + ", ".join(f"{k} {v}" for k, v in header.items() if k != "command")
        + ". Every distinct convolution, with how often the model has it; a layer's time is that "
        "of all its occurrences. The first layer's grad_input is timed too, though training on "
        "images does not compute it.",
    )
    values = {
        name: {gemm: [x.count * x.times[name][gemm] for x in layers] for gemm in GEMMS}
        for name in names
    }
    rows = [
        [x.layer, x.count, name, *(values[name][gemm][i] for gemm in GEMMS)]
        for i, x in enumerate(layers)
        for name in names
    ]
    result.add_table("Milliseconds", ["layer", "count", "strategy", *GEMMS], rows)
    summed = {name: totals(layers, name) for name in names}
    result.add_table(
        "All layers",
        [
            "strategy",
            *(f"{gemm}, ms" for gemm in GEMMS),
            "sum, ms",
            *(f"{g}, share" for g in GEMMS),
        ],
        [
            [name, *t.values(), sum(t.values()), *(time / sum(t.values()) for time in t.values())]
            for name, t in summed.items()
        ],
    )
    figure = gemm_bars([f"{x.layer} ×{x.count}" for x in layers], values, "ms")
    caption = "Time of the three GEMMs of every distinct convolution (SDGP, Figure 9)."
    result.plots.append(Plot("Runtime", "runtime", caption, figure))
    return result
