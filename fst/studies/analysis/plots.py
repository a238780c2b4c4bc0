"""The analyses' figures, with matplotlib alone: nothing is measured here.

They are drawn, and must be saved, in the common style: `reporting.figures.style`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from torch import Tensor

from fst.rules.strategy import GEMMS
from fst.studies.analysis.errors import Error
from fst.studies.analysis.saliency import Saliency
from fst.studies.analysis.time_to_accuracy import TimedCurve
from fst.studies.reporting.figures import COLOURS, GEMM_COLOURS, INK, name_layers

ZERO_COLOUR = "#D00000"
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


def entropies(layers: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Bars of H(X) and H(X|X′) per layer, one panel per kind of input, with the chance level."""
    figure = _figure(5.2 * len(panels), 3.6)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, bits) in zip(axes, panels.items(), strict=True):
        places = range(len(layers))
        axis.bar([p - 0.2 for p in places], bits["H(X)"], 0.38, label="H(X)", color=COLOURS[0])
        axis.bar(
            [p + 0.2 for p in places], bits["H(X|X′)"], 0.38, label="H(X|X′)", color=COLOURS[1]
        )
        axis.plot(
            [p + 0.2 for p in places],
            bits["shuffled"],
            "_",
            markersize=16,
            color=INK,
            markeredgewidth=1.5,
            label="H(X|X′), neighbours shuffled",
        )
        axis.set_title(title, loc="left")
        name_layers(axis, layers)
    axes[0].set_ylabel("bits")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _mosaic(maps: Tensor) -> Tensor:
    """As many of the maps of (C, H, W) as fill a square."""
    side = int(len(maps) ** 0.5)
    height, width = maps.shape[1:]
    tiles = maps[: side * side].reshape(side, side, height, width)
    return tiles.transpose(1, 2).reshape(side * height, side * width)


def features(rows: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """Layer -> title -> (C, H, W): a grid of mosaics of the channels.

    Every row is scaled to [0, 1] by the range of its first image; differences by its width.
    """
    titles = list(next(iter(rows.values())))
    figure = _figure(2.7 * len(titles) + 0.8, 2.7 * len(rows) + 0.3)
    axes = figure.subplots(len(rows), len(titles), squeeze=False)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    for line, (layer, images) in zip(axes, rows.items(), strict=True):
        first = images[titles[0]]
        low, span = float(first.min()), float(first.max() - first.min()) or 1.0
        for axis, title in zip(line, titles, strict=True):
            is_difference = title == "adjacent difference"
            shown = images[title].abs() if is_difference else images[title] - low
            drawn = axis.imshow(
                _mosaic(shown / span).numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest"
            )
            _bare(axis)
        line[0].set_ylabel(layer)
    figure.colorbar(drawn, ax=axes, shrink=0.6)
    return figure


def _bare(axis: Axes) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(True)


def gradient_maps(rows: Mapping[str, Tensor], channels: Sequence[int]) -> Figure:
    """Rule -> grad_output (C, P, Q): one column per channel; exact zeros are red."""
    figure = _figure(1.7 * len(channels) + 1.4, 1.65 * len(rows) + 0.5)
    axes = figure.subplots(len(rows), len(channels), squeeze=False)
    limit = float(next(iter(rows.values()))[list(channels)].abs().max()) or 1.0
    colours = matplotlib.colormaps["gray"].with_extremes(bad=ZERO_COLOUR)
    scale = Normalize(-limit, limit)
    for axis, channel in zip(axes[0], channels, strict=True):
        axis.set_title(f"channel {channel}")
    for line, (rule, maps) in zip(axes, rows.items(), strict=True):
        for axis, channel in zip(line, channels, strict=True):
            shown = maps[channel].float()
            drawn = axis.imshow(
                shown.masked_fill(shown == 0, float("nan")).numpy(),
                cmap=colours,
                norm=scale,
                interpolation="nearest",
            )
            _bare(axis)
        line[0].set_ylabel(rule.replace("_", "\n"))
    figure.colorbar(drawn, ax=axes, shrink=0.6, label="grad_output (red: exactly 0)")
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


def error_row(error: Error | None) -> list[float | None]:
    """The cells of a table for an error that may be missing."""
    return [None, None, None] if error is None else list(error)


def time_to_accuracy(curves: Sequence[TimedCurve], metric: str, target: float | None) -> Figure:
    """Metric over time: solid lines are measured, dashed ones projected."""
    figure = _figure(8, 4.4)
    axis = figure.subplots()
    labels = list(dict.fromkeys(curve.label for curve in curves))
    for curve in curves:
        line = "-" if curve.kind == "measured" else "--"
        axis.plot(
            curve.seconds,
            curve.values,
            line,
            marker="o",
            markersize=3,
            color=_colour(labels.index(curve.label)),
            label=f"{curve.label} ({curve.kind})",
        )
    if target is not None:
        axis.axhline(target, color=INK, linewidth=0.8, linestyle=":")
    axis.set(xlabel="training time (s)", ylabel=metric)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def overhead(names: Sequence[str], shares: Sequence[float]) -> Figure:
    """Horizontal bars: time over that of a dense training step."""
    figure = _figure(7.5, 0.38 * len(names) + 1.1)
    axis = figure.subplots()
    axis.barh(names, shares, color=COLOURS[0])
    for place, share in enumerate(shares):
        axis.annotate(
            f"{share:.2%}",
            (share, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axis.set_xlabel("time over that of a dense training step")
    axis.grid(visible=False, axis="y")
    return figure
