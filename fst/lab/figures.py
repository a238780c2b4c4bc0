"""The style of plots: one for screen, phone and print, written as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#000000"
WIDTH = 6.6  # inches: fits a phone at a readable size
# Okabe and Ito's palette, told apart by most colour-blind people; its yellow is too faint for lines
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7f7f7f")
SMALL = 9  # points, of figures with a column for each layer
MARKED = 50  # points of a curve up to which each is marked: one alone makes no line
LINES = ("-", "--", ":")
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(linestyle=LINES) * cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "grid.alpha": 0.25,
    "grid.color": "#808080",
    "legend.fontsize": "small",
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def style(size: float = 11) -> AbstractContextManager[None]:
    """The common style: figures are drawn and saved within it."""
    return matplotlib.rc_context({**STYLE, "font.size": size})


@contextmanager
def figure(height: float, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of the common width and ``height`` inches, and its axes, in the common style."""
    with style():
        drawn = Figure(figsize=(WIDTH, height), layout="constrained")
        yield drawn, drawn.subplots(**subplots)


def save(drawn: Figure, folder: Path, name: str) -> str:
    """Write NAME.png, on white; returns the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    return f"{name}.png"


def draw_curves(
    axis: Any, curves: Mapping[str, Sequence[Mapping[float, float]]], x_label: str, y_label: str
) -> None:
    """For each label the mean of its curves, and the band from the smallest to the largest."""
    for label, group in curves.items():
        positions = sorted(set.intersection(*(set(curve) for curve in group)) if group else ())
        columns = [[curve[x] for curve in group] for x in positions]
        means = [sum(column) / len(column) for column in columns]
        marker = "." if len(positions) <= MARKED else None
        (line,) = axis.plot(positions, means, label=label, linewidth=1.6, marker=marker)
        if len(group) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            colour = line.get_color()
            axis.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(drawn: Figure, axis: Any, columns: int = 3) -> None:
    """One legend for all panels, below them."""
    handles, labels = axis.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns)
