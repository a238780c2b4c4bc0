"""The analyses' figures, with matplotlib alone: nothing is measured here.

They are drawn, and must be saved, in the common style: `reporting.figures.style`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from fst.lab.reporting.figures import COLOURS, GEMM_COLOURS, INK, name_layers
from fst.rules.strategy import GEMMS


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def macs(
    layers: Sequence[str], dense: Mapping[str, Sequence[float]], left: Mapping[str, Sequence[float]]
) -> Figure:
    """Multiply-adds (10⁹) per layer and GEMM; what a strategy drops is hatched."""
    figure = _figure(max(6.0, 0.42 * len(layers) + 1.5), 3.6)
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


def flips(rates: Mapping[str, Mapping[int, float]]) -> Figure:
    """Flip rates by optimizer step, a curve for each label; "dense" is black."""
    figure = _figure(6.6, 3.6)
    axis = figure.subplots()
    for index, (label, curve) in enumerate(rates.items()):
        colour = INK if label == "dense" else _colour(index - 1)
        line = "-" if index <= len(COLOURS) else "--"
        axis.plot(list(curve), list(curve.values()), label=label, color=colour, linestyle=line)
    axis.set(xlabel="optimizer step", ylabel="flip rate", yscale="log")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
