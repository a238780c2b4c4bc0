"""A grid's metric for each N:M of its settings (SDGP, Figure 8).

python benchmarks/papers/heatmap.py GRID WORK_DIR    (of `fst ablate`)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from paper import drawing, main

from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.results import INTERVAL, Summary, collect
from fst.lab.document import Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The grid, its work dir, and which settings of it."""
    parser.add_argument("grid", type=Path, help="grid file, or fst::configs/ablation/...")
    parser.add_argument("work_dir", type=Path, help="work dir of `fst ablate`")
    parser.add_argument(
        "--only", nargs="+", metavar="SETTING", help="(default: all whose sparsity has n and m)"
    )


def run(options: argparse.Namespace) -> Document:
    """Draw the grid's first metric: rows are ratios m/n, columns group sizes m."""
    grid = load_grid(options.grid)
    results = collect(grid, options.work_dir, options.only or list(grid.settings))
    cells: dict[tuple[float, int], Summary] = {}
    metric = grid.metric.label
    for name, setting in results.grid.settings.items():
        sparsity = setting.sparsity or {}
        if {"n", "m"} <= sparsity.keys():
            place = sparsity["m"] / sparsity["n"], sparsity["m"]
            if place in cells:
                raise ValueError(f"{name}: another setting has its n and m; choose by --only.")
            cells[place] = results.summary(name, grid.metric)
    if not any(cell.values for cell in cells.values()):
        raise ValueError(f"{options.work_dir}: no setting with n and m has a finished run.")
    caption = f"Each row a sparsity ratio, each column a group size. ±: half of {INTERVAL}."
    result = Document(f"{grid.title}: {metric} by N:M", "Means over the seeds.")
    rows = [[*place, cell.mean, cell.interval] for place, cell in sorted(cells.items())]
    result.add_table("By N:M", ["m/n", "m", metric, "±"], rows)
    result.add_figure(f"{metric} by N:M", "heatmap", caption, drawn(cells, metric), options.out)
    return result


def drawn(cells: Mapping[tuple[float, int], Summary], metric: str) -> Figure:
    """Cells are labelled with their value, those that cannot be with N/A."""
    ratios = sorted({ratio for ratio, _ in cells}, reverse=True)
    sizes = sorted({size for _, size in cells})
    image = np.full((len(ratios), len(sizes)), np.nan)
    for (ratio, size), cell in cells.items():
        image[ratios.index(ratio), sizes.index(size)] = cell.mean
    figure = drawing(6.6, 1.2 + 0.75 * len(ratios))
    axis: Any = figure.subplots()
    axis.grid(False)
    axis.spines[:].set_visible(False)
    mesh = axis.pcolormesh(image, cmap="viridis", edgecolor="white", linewidth=2)
    middle = (np.nanmin(image) + np.nanmax(image)) / 2
    for (row, column), value in np.ndenumerate(image):
        colour = "#808080" if math.isnan(value) else "white" if value < middle else "black"
        text = str(cells.get((ratios[row], sizes[column]), "N/A"))
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour)
    axis.set_xticks(np.arange(len(sizes)) + 0.5, map(str, sizes))
    axis.set_yticks(np.arange(len(ratios)) + 0.5, [f"{ratio:g}" for ratio in ratios])
    axis.set(xlabel="group size m", ylabel="sparsity ratio m/n")
    axis.invert_yaxis()
    figure.colorbar(mesh, ax=axis, label=metric)
    return figure


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
