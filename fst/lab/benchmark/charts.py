"""A benchmark's bar charts; needs matplotlib, so nothing in the core imports this."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from fst.lab.benchmark.breakdown import CATEGORIES, IDLE, parts_of_step
from fst.lab.benchmark.measurements import Measurements
from fst.lab.benchmark.steps import StepTimes
from fst.lab.reporting.figures import COLOURS, INK, SMALL, gemm_bars, style
from fst.rules.strategy import GEMMS

HIGHEST_RATIO = 4.0  # bars beyond are cut off
WHOLE = "whole step"
COLOURS = {
    **dict(zip(CATEGORIES, (*COLOURS, INK, "#bbbbbb"), strict=True)),
    IDLE: "#eeeeee",
    WHOLE: COLOURS[0],
}


def draw(found: Measurements, out: Path) -> list[Path]:
    """OUT.png, a step's time and its parts, and OUT_layers.png, as far as there are found."""
    written = []
    with style(SMALL):
        figures: dict[str, Figure] = {}
        if found.steps is not None:
            figures[out.name] = step_bars(found.steps, found.breakdown, found.device)
        if found.layers and GEMMS[0] in found.layers[0].times:
            figures[f"{out.name}_layers"] = layer_bars(found)
        for name, figure in figures.items():
            written.append(out.with_name(f"{name}.png"))
            figure.savefig(written[-1], dpi=130)
    return written


def step_bars(steps: StepTimes, breakdown: dict[str, dict[str, float]], device: str) -> Figure:
    """Runtime of a training step by contestant, in its parts (as in SDGP, Figure 9).

    Bars are medians, divided as a profiled step was; the whiskers are their quartiles.
    """
    names = list(steps.step)
    figure = Figure(figsize=(8.0, 0.42 * len(names) + 1.9), layout="constrained")
    axis = figure.subplots()
    places = range(len(names))
    medians = [steps.step[name].median for name in names]
    divided = [
        parts_of_step(median, breakdown[name], device) if name in breakdown else {WHOLE: median}
        for name, median in zip(names, medians, strict=True)
    ]
    start = [0.0] * len(names)
    for part, colour in COLOURS.items():
        widths = [parts.get(part, 0.0) for parts in divided]
        if any(widths):
            axis.barh(places, widths, left=start, height=0.7, color=colour, label=part)
            start = [s + width for s, width in zip(start, widths, strict=True)]
    below = [steps.step[name].median - steps.step[name].low for name in names]
    above = [steps.step[name].high - steps.step[name].median for name in names]
    axis.errorbar(medians, places, xerr=(below, above), fmt="none", ecolor=INK, capsize=3)
    for place, name in enumerate(names):
        axis.annotate(
            f"{medians[place]:.1f} ms, {steps.ratios(name)[0]:.2f}×",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    axis.set_xlim(0, 1.15 * max(medians))
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("ms per training step (right: the median, and its speed against torch)")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8
    )
    return figure


def layer_bars(found: Measurements) -> Figure:
    """Speed of each layer's GEMMs against torch's, one panel per strategy."""
    layers = found.layers
    strategies = dict.fromkeys(name for layer in layers for name in layer.decisions["output"])
    values = {
        name: {gemm: [layer.ratio(gemm, name) for layer in layers] for gemm in GEMMS}
        for name in strategies
    }
    figure = gemm_bars([str(layer.shape) for layer in layers], values, "speed against torch")
    ratios = [x for panel in values.values() for of_gemm in panel.values() for x in of_gemm]
    highest = max(x for x in ratios if not math.isnan(x))
    for axis in figure.axes:
        axis.set_ylim(0, min(1.05 * highest, HIGHEST_RATIO))
        axis.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    return figure
