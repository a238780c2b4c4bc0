"""A grid's metric for each N:M of its settings (SDGP, Figure 8).

python benchmarks/papers/heatmap.py WORK_DIR    (of `fst ablate`)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from paper import drawing, main

from fst.lab.reporting.document import Document

Cell = tuple[float | None, float | None]  # a mean, and half of its interval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work dir, and which settings of it."""
    parser.add_argument("work_dir", type=Path, help="work dir of `fst ablate`")
    parser.add_argument(
        "--only", nargs="+", metavar="SETTING", help="(default: all whose sparsity has n and m)"
    )


def run(options: argparse.Namespace) -> Document:
    """Draw the first metric of results.json: rows are ratios m/n, columns group sizes m."""
    made = json.loads((options.work_dir / "results.json").read_text(encoding="utf-8"))
    cells: dict[tuple[float, int], Cell] = {}
    metric = ""
    for name, setting in made["settings"].items():
        sparsity = setting["sparsity"] or {}
        if {"n", "m"} <= sparsity.keys() and name in (options.only or made["settings"]):
            metric, found = next(iter(setting["metrics"].items()))
            place = sparsity["m"] / sparsity["n"], sparsity["m"]
            if place in cells:
                raise ValueError(f"{name}: another setting has its n and m; choose by --only.")
            cells[place] = found["mean"], found["interval"]
    if not any(mean is not None for mean, _ in cells.values()):
        raise ValueError(f"{options.work_dir}: no setting with n and m has a finished run.")
    caption = f"Each row a sparsity ratio, each column a group size. ±: half of {made['interval']}."
    result = Document(f"{made['title']}: {metric} by N:M", "Means over the seeds.")
    rows = [[ratio, size, *cell] for (ratio, size), cell in sorted(cells.items())]
    result.add_table("By N:M", ["m/n", "m", metric, "±"], rows)
    result.add_figure(f"{metric} by N:M", "heatmap", caption, drawn(cells, metric), options.out)
    return result


def drawn(cells: Mapping[tuple[float, int], Cell], metric: str) -> Figure:
    """Cells are labelled with their value, those that cannot be with N/A."""
    ratios = sorted({ratio for ratio, _ in cells}, reverse=True)
    sizes = sorted({size for _, size in cells})
    image = np.full((len(ratios), len(sizes)), np.nan)
    for (ratio, size), (mean, _) in cells.items():
        image[ratios.index(ratio), sizes.index(size)] = math.nan if mean is None else mean
    figure = drawing(6.6, 1.2 + 0.75 * len(ratios))
    axis: Any = figure.subplots()
    axis.grid(False)
    axis.spines[:].set_visible(False)
    mesh = axis.pcolormesh(image, cmap="viridis", edgecolor="white", linewidth=2)
    middle = (np.nanmin(image) + np.nanmax(image)) / 2
    for (row, column), value in np.ndenumerate(image):
        colour = "#808080" if math.isnan(value) else "white" if value < middle else "black"
        text = words(cells.get((ratios[row], sizes[column])))
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour)
    axis.set_xticks(np.arange(len(sizes)) + 0.5, map(str, sizes))
    axis.set_yticks(np.arange(len(ratios)) + 0.5, [f"{ratio:g}" for ratio in ratios])
    axis.set(xlabel="group size m", ylabel="sparsity ratio m/n")
    axis.invert_yaxis()
    figure.colorbar(mesh, ax=axis, label=metric)
    return figure


def words(cell: Cell | None) -> str:
    """Text of a cell."""
    if cell is None:
        return "N/A"
    mean, interval = cell
    if mean is None:
        return "–"
    return f"{mean:.2f}" + ("" if interval is None else f" ± {interval:.2f}")


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
