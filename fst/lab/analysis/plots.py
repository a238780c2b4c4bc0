"""The analyses' figures, with matplotlib alone: nothing is measured here.

They are drawn, and must be saved, in the common style: `reporting.figures.style`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from fst.lab.analysis.saliency import Saliency
from fst.lab.reporting.figures import COLOURS, GEMM_COLOURS, INK, name_layers
from fst.rules.strategy import GEMMS

_SCOPES = {"local": "--", "global": "-"}


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


def saliency(found: Sequence[Saliency], field: str, label: str, *, log: bool) -> Figure:
    """A field of `Error` by depth: dashed local, solid global; a panel for each gradient.

    On a logarithmic axis errors of 0 are left out.
    """
    names = [layer.name for layer in found[0].layers]
    figure = _figure(max(11.0, 0.36 * len(names) + 4), 4.6)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, gradient in zip(axes, ("grad_weight", "grad_input"), strict=True):
        for index, one in enumerate(found):
            for scope, line in _SCOPES.items():
                points = [
                    (layer.depth, getattr(layer.errors[kind], field))
                    for kind in [f"{scope} {gradient}"]
                    for layer in one.layers
                    if kind in layer.errors
                ]
                points = [point for point in points if point[1] > 0 or not log]
                if points:
                    x, y = zip(*points, strict=True)
                    axis.plot(x, y, line, marker="o", markersize=3, color=_colour(index))
        axis.set_title(gradient, loc="left")
        name_layers(axis, names)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(_plain_number)
            axis.yaxis.set_minor_formatter(_plain_number)
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes[0].set_ylabel(label)
    keys = [Line2D([], [], color=_colour(i), label=one.label) for i, one in enumerate(found)]
    keys += [Line2D([], [], color=INK, linestyle=ls, label=s) for s, ls in _SCOPES.items()]
    figure.legend(handles=keys, loc="outside right upper", fontsize=8)
    return figure


def bias(found: Sequence[Saliency]) -> Figure:
    """Bars of the gain of each part of the kernel, a colour for each approximation."""
    parts = list(found[0].bias)
    width = 0.8 / len(found)
    figure = _figure(max(7.0, 0.3 * len(parts) * len(found) + 4), 3.6)
    axis = figure.subplots()
    for index, one in enumerate(found):
        places = [i + (index - (len(found) - 1) / 2) * width for i in range(len(parts))]
        gains = [one.bias[part].gain for part in parts]
        spread = [one.bias[part].deviation for part in parts]
        colour = _colour(index)
        axis.bar(places, gains, 0.9 * width, yerr=spread, label=one.label, color=colour)
    axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(parts)), [part.replace(" along ", "\nalong ") for part in parts])
    axis.set_ylabel("gain")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _plain_number(value: float, _: int | None = None) -> str:
    return f"{value:g}"


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
