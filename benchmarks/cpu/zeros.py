"""Products of convolutions that leave zeros out, beside torch's and SparseProp's, on one page.

    python benchmarks/cpu/zeros.py --threads 2 1 --sparseprop FOLDER

FOLDER is where SparseProp was built; without it the page has dashes there:

    pip install --no-deps --target FOLDER git+https://github.com/IST-DASLab/sparseprop

All programs of a layer run in turns, in both orders; a layer's ratio is one of medians. The page is
docs/results/cpu_zeros_ops.md, all times in milliseconds are in benchmarks/out/zeros.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from page import BOLD, OUT, RESULTS, goal_cell, goal_of, is_reached, machine
from products import AGAIN, BOTH, UNSTRUCTURED, Layer, Row, SparseProp, programs

from fst import get_strategy
from fst.backends.timing import Function, compare, geometric_mean
from fst.basics.arguments import positive
from fst.basics.machine import instructions
from fst.basics.text import counted_as, table
from fst.cli.environment import surroundings
from fst.files.checkpoint import write_text_atomically
from fst.lab.benchmark import PLAIN, layer_shapes
from fst.lab.benchmark.cli import keep_freed_memory
from fst.lab.model import Training, from_name
from fst.ops.cpp import missing
from fst.ops.cpp.zeros_weight import zeros_lists
from fst.rules.masks import nm_mask

CPU = torch.device("cpu")
MATRIX = 1024  # rows and columns, whose product shows what the machine can do
Times = dict[str, float]  # program -> milliseconds


class Group(NamedTuple):
    """Layers whose ratios have one geometric mean.

    Attributes:
        rows: of its table.
        rivalry: rows that are measured beside SparseProp.
    """

    title: str
    layers: tuple[Layer, ...]
    rows: tuple[Row, ...]
    rivalry: tuple[Row, ...] = ()

    @property
    def products(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(row.product for row in self.rows))

    @property
    def programs(self) -> set[str]:
        """Names of all that is measured, SparseProp included."""
        rows = (*self.rows, *self.rivalry)
        dense = {row.product for row in rows}
        controls = {f"{product}, {AGAIN}" for product in dense}
        of_goals = [row for row in self.rows if row.goals]
        parts = {part for row in of_goals for part in (row.lists, row.around) if part}
        theirs = {row.theirs for row in self.rivalry}
        return dense | controls | parts | theirs | {str(row) for row in rows}


THREE = Group(
    "3×3 of ResNet-18",
    (
        Layer(64, 64, 56, 3, 1),
        Layer(64, 128, 56, 3, 2),
        Layer(128, 128, 28, 3, 1),
        Layer(128, 256, 28, 3, 2),
        Layer(256, 256, 14, 3, 1),
        Layer(256, 512, 14, 3, 2),
        Layer(512, 512, 7, 3, 1),
    ),
    (
        Row("Y", "W dense", 1),
        Row("Y", "W 2:4", 1 / 2, (1.6, 1.35)),
        Row("Y", "W 1:4", 1 / 4, (2.9, 2.2)),
        Row("Y", "W 1:8", 1 / 8, (4.5, 3.3)),
        Row("dX", "W dense", 1),
        Row("dX", "W 2:4", 1 / 2, (1.6, 1.35)),
        Row("dX", "W 1:4", 1 / 4, (2.9, 2.2)),
        Row("dX", "W 1:8", 1 / 8, (4.5, 3.3)),
        Row("dX", "dY dense", 1),
        Row("dX", "dY 2:4", 1 / 2, (1.35, 1.15)),
        Row("dX", "dY 4:32", 1 / 8, (2.5, 2.0)),
        Row("dW", "X dense", 1),
        Row("dW", "X half", 1 / 2, (2.0, 1.5)),
    ),
    tuple(Row(p, zeros, 1 - share) for p in ("Y", BOTH) for zeros, share in UNSTRUCTURED.items()),
)
ONE = Group(
    "1×1 of ResNet-50's last three stages",
    (
        Layer(512, 128, 28, 1, 1),
        Layer(128, 512, 28, 1, 1),
        Layer(1024, 256, 14, 1, 1),
        Layer(256, 1024, 14, 1, 1),
        Layer(2048, 512, 7, 1, 1),
        Layer(512, 2048, 7, 1, 1),
    ),
    (
        Row("Y", "W dense", 1),
        Row("Y", "W 2:4", 1 / 2, (1.3, 1.15)),
        Row("Y", "W 1:4", 1 / 4, (2.0, 1.7)),
    ),
)
NETWORK, STRATEGY, MOST_OF_STEP = "resnet18", "srste", 0.03


class Parts(NamedTuple):
    """Milliseconds of a row's program, all layers together: in all, and by what takes them."""

    all: float
    lists: float
    around: float

    @property
    def loop(self) -> float:
        """The time that is left for multiply-adds."""
        return self.all - self.lists - self.around


class Found(NamedTuple):
    """Measurements with a number of threads.

    Attributes:
        layers: group -> layer -> times of its programs.
        matrix: milliseconds of a product of two dense matrices.
        step: times of the steps of a network, and of building all of its lists.
    """

    layers: dict[Group, dict[Layer, Times]]
    matrix: float
    step: Times

    def ratio(self, group: Group, product: str, program: str) -> float:
        """Geometric mean of torch's time over the program's; NaN if it was not measured."""
        measured = [times for times in self.layers[group].values() if program in times]
        return geometric_mean(times[product] / times[program] for times in measured)

    def control(self, group: Group, product: str) -> float:
        """Geometric mean of torch's time over that of the same program, run a second time."""
        return self.ratio(group, product, f"{product}, {AGAIN}")

    def total(self, group: Group, program: str) -> float:
        """Milliseconds of all layers together."""
        return sum(times[program] for times in self.layers[group].values())

    def parts(self, group: Group, row: Row) -> Parts:
        """The parts of a row's time."""
        lists = self.total(group, row.lists) if row.lists else 0.0
        return Parts(self.total(group, str(row)), lists, self.total(group, row.around))


def main() -> None:
    """Measure all, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, nargs="+", default=[2, 1])
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--layers", type=positive, help="the first ones of each group alone")
    parser.add_argument("--sparseprop", type=Path, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=RESULTS / "cpu_zeros_ops.md")
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    keep_freed_memory()
    sparseprop = built(options.sparseprop) if options.sparseprop else None
    found = {threads: measure(threads, options, sparseprop) for threads in options.threads}
    OUT.mkdir(parents=True, exist_ok=True)
    write_text_atomically(json.dumps(as_json(found), indent=1), OUT / "zeros.json")
    version = sparseprop.version if sparseprop else None
    write_text_atomically(page(found, options, version), options.page)


def built(folder: Path) -> SparseProp:
    """SparseProp from its folder, or an error."""
    try:
        return SparseProp(folder)
    except ImportError as error:
        reason = f"must be a folder where SparseProp was built: {error}"
        raise SystemExit(f"error: --sparseprop {folder} {reason}") from error


def measure(threads: int, options: argparse.Namespace, sparseprop: SparseProp | None) -> Found:
    """All groups, and a step."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers: dict[Group, dict[Layer, Times]] = {THREE: {}, ONE: {}}
    for group, times in layers.items():
        for layer in group.layers[: options.layers]:
            print(f"{threads} threads, {layer} …", file=sys.stderr, flush=True)
            rival = sparseprop if group.rivalry else None
            made = programs(layer, options.batch, rival)
            made = {name: program for name, program in made.items() if name in group.programs}
            timings = compare(made, options.rounds, CPU, warmup=1)
            times[layer] = {name: timing.median for name, timing in timings.items()}
    left, right = torch.randn(2, MATRIX, MATRIX)
    matrix = compare({"product": lambda: left @ right}, options.rounds, CPU)["product"].median
    return Found(layers, matrix, step_times(options.batch, options.rounds))


def step_times(batch: int, rounds: int) -> Times:
    """Training steps of the network, plain and with 2:4 weights, and building its lists."""
    training = from_name(NETWORK, batch)
    strategies = {PLAIN: None, STRATEGY: get_strategy(STRATEGY)}
    steps = {name: training.candidate(strategy)[1] for name, strategy in strategies.items()}
    timings = compare({**steps, "lists": all_lists(training)}, min(rounds, 3), CPU, warmup=1)
    return {name: timing.median for name, timing in timings.items()}


def all_lists(training: Training) -> Function:
    """Building the lists of Y and of dX of all layers with 2:4 weights, each once."""
    calls = []
    shapes = layer_shapes(training.model, lambda: training.loss(training.model))
    for shape, names in shapes.items():
        if shape.in_channels % 4:
            continue
        weight = torch.randn(shape.out_channels, shape.in_channels, *shape.kernel)
        weight = weight.contiguous(memory_format=torch.channels_last)
        weight *= nm_mask(weight, 2, 4, 1)
        size = (shape.batch, shape.in_channels, shape.height, shape.width)
        calls += len(names) * [(weight, size, *shape.geometry)]
    return lambda: [
        zeros_lists(*call, grad_input) for call in calls for grad_input in (False, True)
    ]


def as_json(found: dict[int, Found]) -> dict[str, object]:
    """All times by their names."""
    return {
        f"{threads} threads": {
            "matrix": of.matrix,
            "step": of.step,
            **{
                group.title: {str(layer): times for layer, times in layers.items()}
                for group, layers in of.layers.items()
            },
        }
        for threads, of in found.items()
    }


def page(found: dict[int, Found], options: argparse.Namespace, sparseprop: str | None) -> str:
    """The page; goals are for the first number of threads, ``sparseprop`` is its version."""
    header, batch = surroundings(CPU), options.batch
    first = next(iter(found.values()))
    has_wide = "avx512f" in instructions()
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
            "" if has_wide else "No processor with AVX-512 was at hand: this one has none.",
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


if __name__ == "__main__":
    main()
