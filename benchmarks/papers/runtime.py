"""Time per layer and GEMM under each strategy (SDGP, Figure 9).

python benchmarks/papers/runtime.py OUT.json    (of `fst bench`)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from paper import main, name_layers

from fst.lab.benchmark.layers import PLAIN
from fst.lab.document import Document
from fst.lab.figures import COLOURS, SMALL
from fst.rules.strategy import GEMMS


class LayerRuntime(NamedTuple):
    """A distinct convolution: how often the model has it, and milliseconds of one call by
    candidate and GEMM.
    """

    layer: str
    count: int
    times: dict[str, dict[str, float]]


def layer_runtimes(report: Mapping[str, Any]) -> list[LayerRuntime]:
    """From the JSON report of `fst bench`.

    Raises:
        ValueError: it is no such report, or one without times of layers.
    """
    try:
        names = dict.fromkeys(n for entry in report["layers"] for n in entry["times"][GEMMS[0]])
        found = [
            LayerRuntime(entry["layer"], entry["count"], _by_candidate(entry["times"], names))
            for entry in report["layers"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this is no report of `fst bench`: {type(error).__name__} {error}."
        ) from error
    if not found:
        raise ValueError("the report has no times of layers: `--measure layers` adds them.")
    return found


def _by_candidate(times: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, float]]:
    """A strategy that was not timed leaves the layer dense."""
    return {
        name: {gemm: times[gemm].get(name, times[gemm][PLAIN])["median"] for gemm in GEMMS}
        for name in names
    }


def totals(layers: Sequence[LayerRuntime], candidate: str = PLAIN) -> dict[str, float]:
    """Milliseconds of each GEMM over all layers, as often as each occurs."""
    return {gemm: sum(x.count * x.times[candidate][gemm] for x in layers) for gemm in GEMMS}


def gemm_shares(report: Mapping[str, Any]) -> dict[str, float]:
    """Share of a dense training step that each GEMM of the convolutions takes.

    Where the report has no time of a step, all of it is taken to be convolutions, as SDGP does.
    """
    spent = totals(layer_runtimes(report))
    steps = report.get("steps") or {}
    step = steps["step"][PLAIN]["median"] if "step" in steps else sum(spent.values())
    return {gemm: min(1.0, time / step) for gemm, time in spent.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("report", type=Path, help="JSON file that `fst bench` has written")
    parser.add_argument(
        "--strategies", nargs="+", metavar="NAME", help="of the report's (default: all)"
    )


def run(options: argparse.Namespace) -> Document:
    """Draw and sum up what was measured."""
    report = json.loads(options.report.read_text(encoding="utf-8"))
    layers = layer_runtimes(report)
    known = list(layers[0].times)
    names = options.strategies or known
    for name in names:
        if name not in known:
            raise ValueError(f"--strategies {name!r} is not in the report: {', '.join(known)}.")
    header = report.get("header", {})
    result = Document(
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
    result.add_figure("Runtime", "runtime", caption, figure, options.out)
    return result


def gemm_bars(
    layers: Sequence[str], values: Mapping[str, Mapping[str, Sequence[float]]], label: str
) -> Figure:
    """Grouped bars: one group per layer, one bar per GEMM.

    ``values``: panel title -> GEMM -> one number per layer.
    """
    size = (max(6.0, 0.42 * len(layers) + 1.5), 1.4 * len(values) + 1.2)
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots(len(values), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, (title, of_gemm) in zip(axes, values.items(), strict=True):
        for offset, gemm, colour in zip((-0.27, 0.0, 0.27), GEMMS, COLOURS[:3], strict=True):
            places = [i + offset for i in range(len(layers))]
            axis.bar(places, of_gemm[gemm], 0.25, label=gemm, color=colour)
        axis.set_title(title, loc="left", fontsize=SMALL)
        axis.set_ylabel(label)
        axis.grid(visible=False, axis="x")
    name_layers(axes[-1], layers)
    drawn.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside upper right")
    return drawn


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
