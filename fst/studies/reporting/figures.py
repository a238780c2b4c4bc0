"""How plots look: one style for screen, phone and print, written as SVG and PNG."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#010203"  # the report turns this one black into the page's text colour
WIDTH = 6.6  # inches: fits a phone at a readable size
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7f7f7f")
LINES = ("-", "--", ":")
STYLE = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(linestyle=LINES) * cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "font.size": 11,
    "grid.alpha": 0.25,
    "grid.color": "#808080",
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fst",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def figure(height: float, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of the common width and `height` inches, and its axes, in the common style."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(WIDTH, height), layout="constrained")
        yield drawn, drawn.subplots(**subplots)


def save(drawn: Figure, folder: Path, name: str) -> str:
    """Writes NAME.svg, transparent, and NAME.png, on white; returns the SVG's file name."""
    drawn.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    drawn.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
    return f"{name}.svg"


def draw_curves(
    axis: Any, curves: Mapping[str, Sequence[Mapping[int, float]]], x_label: str, y_label: str
) -> None:
    """For each label the mean of its curves, and the band from the smallest to the largest."""
    for label, group in curves.items():
        positions = sorted(set.intersection(*(set(curve) for curve in group)) if group else ())
        columns = [[curve[x] for curve in group] for x in positions]
        means = [sum(column) / len(column) for column in columns]
        (line,) = axis.plot(positions, means, label=label, linewidth=1.6)
        if len(group) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            colour = line.get_color()
            axis.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def skip_first_rise(axis: Any, curves: Iterable[Sequence[Mapping[int, float]]]) -> None:
    """Starts the y axis at the lowest value after the first third, so that the end can be seen."""
    late = [
        value
        for curve in itertools.chain.from_iterable(curves)
        for x, value in curve.items()
        if x > (2 * min(curve) + max(curve)) / 3
    ]
    if late:
        span = (max(late) - min(late)) or 1.0
        axis.set_ylim(min(late) - 0.05 * span, max(late) + 0.05 * span)


def legend_below(drawn: Figure, axis: Any, columns: int = 3) -> None:
    """One legend for all panels, below them."""
    handles, labels = axis.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns)
