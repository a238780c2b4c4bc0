"""The page docs/results/cpu_zeros_ops.md, of what zeros.py has measured."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

import torch
from measured import MATRIX, STRATEGY, Found, Group
from page import BOLD, goal_cell, goal_of, is_reached, machine
from products import AGAIN, BOTH

from fst.basics.text import counted_as, table
from fst.cli.environment import surroundings
from fst.lab.benchmark import PLAIN

MOST_OF_STEP = 0.03  # that building lists may take


def page(found: dict[int, Found], options: argparse.Namespace, sparseprop: str | None) -> str:
    """The page; goals are for the first number of threads, ``sparseprop`` is its version."""
    header, batch = surroundings(torch.device("cpu")), options.batch
    first = next(iter(found.values()))
    command = ["python", "benchmarks/cpu/zeros.py", "--threads", *map(str, found)]
    command += ["--batch", str(batch), "--rounds", str(options.rounds)]
    command += ["--layers", str(options.layers)] if options.layers else []
    command += ["--sparseprop", "FOLDER"] if options.sparseprop else []
    lines = [
        f"# Products that leave zeros out, {header['instruction set']}",
        "",
        paragraph(
            f"{machine(header)}, float32, channels_last, batch {batch}, "
            f"commit {header.get('commit', 'unknown')}.",
            "Torch and the C++ kernels choose the instruction set themselves.",
        ),
        "",
        f"    {' '.join(command)}",
        "",
        paragraph(
            "A ratio is torch's time / this library's: the geometric mean over layers, of medians "
            f"of {counted_as(options.rounds, 'round', 'rounds')}.",
            "All programs of a layer run in turns, in both orders; freed memory is kept.",
            "Building lists of the weights and packing the maps are included. Choosing which "
            "numbers are zero (pruning) is not.",
            "`dense` has no zeros: the gain of the kernel alone.",
            f"X has the zeros of ReLU: half of it, at random. {BOLD}",
        ),
    ]
    for group in first.layers:
        lines += ["", f"## {group.title}", "", ratios(group, found)]
    lines += ["", "## Where the time goes", "", *where_time_goes(first, batch)]
    lines += ["", "## Lists of the weights, in a step", "", *share_of_step(found, batch)]
    lines += ["", "## Beside SparseProp", "", *beside(found, sparseprop)]
    lines += ["", "## Layer by layer", "", *by_layer(found)]
    return "\n".join(lines) + "\n"


def paragraph(*sentences: str) -> str:
    """Lines of at most 100 characters."""
    return textwrap.fill(" ".join(sentences), 100, break_on_hyphens=False)


def ratios(group: Group, found: dict[int, Found]) -> str:
    """A row for each product and operand with zeros, and torch again as the control."""
    first, *others = found.values()
    rows = []
    for product in group.products:
        cells = [f"{of.control(group, product):.2f}" for of in found.values()]
        rows.append([product, AGAIN, cells[0], "", *cells[1:]])
        for row in (row for row in group.rows if row.product == product):
            ratio = first.ratio(group, product, str(row))
            goal = goal_cell(row.goals, ratio, first.control(group, product))
            rest = [f"{of.ratio(group, product, str(row)):.2f}" for of in others]
            rows.append([product, row.zeros, f"{ratio:.2f}", goal, *rest])
    one, *more = (in_words(threads) for threads in found)
    return table(("product", "zeros", one, "goal", *more), rows, markdown=True)


def in_words(threads: int) -> str:
    """The number and the word for it."""
    return counted_as(threads, "thread", "threads")


def where_time_goes(found: Found, batch: int) -> list[str]:
    """The parts of each row with a goal, and the goals that are missed."""
    rows, missed = [], []
    for group, layers in found.layers.items():
        operations = sum(layer.operations(batch) for layer in layers)
        for row in (row for row in group.rows if row.goals):
            parts = found.parts(group, row)
            shares = [f"{part / parts.all:.0%}" for part in (parts.lists, parts.around, parts.loop)]
            speeds = [
                f"{count / milliseconds / 1e6:.0f}"
                for count, milliseconds in (
                    (operations * row.left, parts.loop),
                    (operations, found.total(group, row.product)),
                )
            ]
            cells = [group.title, str(row), f"{parts.all:.1f}"]
            rows.append([*cells, shares[0] if row.lists else "in packing", *shares[1:], *speeds])
            ratio = found.ratio(group, row.product, str(row))
            control = found.control(group, row.product)
            if not is_reached(row.goals, ratio, control):
                lists = f"lists of W take {shares[0]} of the time, " if row.lists else ""
                missed.append(
                    f"- {group.title}, {row}: {ratio:.2f}, the control {control:.2f}, instead of "
                    f"{goal_of(row.goals)}: {lists}packing and writing {shares[1]}; the loop runs "
                    f"at {speeds[0]} GFLOP/s, torch's dense product at {speeds[1]}."
                )
    titles = ["layers", "product, zeros", "ms", "lists of W", "packing, writing", "loop"]
    titles += ["loop's GFLOP/s", "torch's dense GFLOP/s"]
    speed = 2 * MATRIX**3 / found.matrix / 1e6
    return [
        paragraph(
            "Times of all layers of a table together.",
            "Lists are built apart. Packing and writing is the time of the same call with an "
            "operand of zeros alone. The loop is the rest.",
            "GFLOP/s count the multiply-adds that are left, as two operations each.",
            f"A product of two dense {MATRIX}×{MATRIX} matrices runs at {speed:.0f} GFLOP/s here.",
        ),
        "",
        table(titles, rows, markdown=True),
        "",
        *(["Goals that are missed:", "", *missed] if missed else ["All goals are reached."]),
    ]


def share_of_step(found: dict[int, Found], batch: int) -> list[str]:
    """Building all lists once, as a share of a step; at most `MOST_OF_STEP` is the goal."""
    rows = []
    for threads, of in found.items():
        share = of.step["lists"] / of.step[STRATEGY]
        goal = f"**{MOST_OF_STEP:.0%}**" if share <= MOST_OF_STEP else f"{MOST_OF_STEP:.0%}"
        steps = [f"{of.step[name]:.1f}" for name in ("lists", STRATEGY, PLAIN)]
        rows.append([in_words(threads), *steps, f"{share:.1%}", goal])
    titles = ("", "lists, ms", f"`{STRATEGY}`'s step, ms", "torch's step, ms", "share", "at most")
    return [
        paragraph(
            f"ResNet-18, 224 pixels, batch {batch}, 2:4 weights: building the lists of Y and dX of "
            f"all layers once, and a training step. The share is of the step of `{STRATEGY}`."
        ),
        "",
        table(titles, rows, markdown=True),
    ]


def beside(found: dict[int, Found], version: str | None) -> list[str]:
    """SparseProp's and our ratios by unstructured zeros of W."""
    how = paragraph(
        f"SparseProp {version} (Nikdan et al., ICML 2023), as its `setup.py` compiles it for this "
        "processor, is called by its own module, with the faster of its two kernels as it chooses.",
        "It takes contiguous maps, and its lists are built before.",
        "Ratios are to torch's channels_last, as above.",
        "Both libraries take the same weights, whose zeros are unstructured.",
        f"{BOTH} is one call of SparseProp, which computes dW at the weights that are not zero; "
        "torch and this library compute all of dW, this library without the zeros of X.",
    )
    if version is None:
        how = "SparseProp was not measured: the command named no folder where it was built."
    rows = []
    for group in (group for group in next(iter(found.values())).layers if group.rivalry):
        for row in group.rivalry:
            cells = []
            for of in found.values():
                theirs = of.ratio(group, row.product, row.theirs)
                ours = of.ratio(group, row.product, str(row))
                cells += ["–" if version is None else f"{theirs:.2f}", f"{ours:.2f}"]
            rows.append([group.title, row.product, row.zeros, *cells])
    titles = [
        f"{who}, {in_words(threads)}" for threads in found for who in ("SparseProp", "this library")
    ]
    return [how, "", table(("layers", "product", "zeros", *titles), rows, markdown=True)]


def by_layer(found: dict[int, Found]) -> Iterator[str]:
    """Torch's milliseconds, and the ratios of the rows with goals."""
    threads, first = next(iter(found.items()))
    yield f"With {in_words(threads)}: torch's milliseconds, and torch's time / time."
    for group, layers in first.layers.items():
        shown = [row for row in group.rows if row.goals]
        rows = [
            [
                str(layer),
                *(f"{times[product]:.1f}" for product in group.products),
                *(f"{times[row.product] / times[str(row)]:.2f}" for row in shown),
            ]
            for layer, times in layers.items()
        ]
        titles = ("layer", *(f"{product}, ms" for product in group.products), *map(str, shown))
        yield from ("", table(titles, rows, markdown=True))
