"""Products of convolutions that leave zeros out, beside torch's and SparseProp's, on one page.

    python benchmarks/cpu/zeros.py --threads 2 1 --sparseprop FOLDER

FOLDER is where SparseProp was built; without it the page has dashes there:

    pip install --no-deps --target FOLDER git+https://github.com/IST-DASLab/sparseprop

All programs of a layer run in turns, in both orders; a layer's ratio is one of medians. The page is
docs/results/cpu_zeros_ops.md, or cpu_zeros_ops_avx512.md, as torch's instruction set is.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from products import AGAIN, BOTH, ONE, THREE, Group, Layer, SparseProp, programs

from fst.backends.timing import compare, geometric_mean
from fst.basics.arguments import positive
from fst.basics.machine import keep_freed_memory
from fst.basics.text import counted_as, table
from fst.cli.environment import surroundings
from fst.files.checkpoint import write_text_atomically
from fst.ops.cpp import missing

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
Times = dict[str, float]  # program -> milliseconds
Found = Mapping[Group, Mapping[Layer, Times]]


def main() -> None:
    """Measure all, and write the page."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, nargs="+", default=[2, 1])
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--layers", type=positive, help="the first ones of each group alone")
    parser.add_argument("--sparseprop", type=Path, metavar="FOLDER")
    page_of = RESULTS / f"cpu_zeros_ops{'_avx512' if wide else ''}.md"
    parser.add_argument("--page", type=Path, default=page_of)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    keep_freed_memory()
    sparseprop = built(options.sparseprop) if options.sparseprop else None
    found = {threads: measure(threads, options, sparseprop) for threads in options.threads}
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
    """Times of all groups' programs."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    found: dict[Group, dict[Layer, Times]] = {THREE: {}, ONE: {}}
    for group, times in found.items():
        for layer in group.layers[: options.layers]:
            print(f"{threads} threads, {layer} …", file=sys.stderr, flush=True)
            rival = sparseprop if group.rivalry else None
            made = programs(layer, options.batch, rival)
            made = {name: program for name, program in made.items() if name in group.programs}
            timings = compare(made, options.rounds, CPU, warmup=6)
            times[layer] = {name: timing.median for name, timing in timings.items()}
    return found


def page(found: Mapping[int, Found], options: argparse.Namespace, sparseprop: str | None) -> str:
    """The page; ``sparseprop`` is its version."""
    header, folder = surroundings(CPU), str(options.sparseprop)
    command = ["FOLDER" if word == folder else word for word in sys.argv]
    first = next(iter(found.values()))
    lines = [
        f"# Products that leave zeros out, {header['instruction set']}",
        "",
        paragraph(
            f"{header['device']}, {header['instruction set']}, torch {header['torch']}, float32, "
            f"channels_last, batch {options.batch}, commit {header.get('commit', 'unknown')}.",
            "Torch and the C++ kernels choose the instruction set themselves.",
        ),
        "",
        f"    python {shlex.join(command)}",
        "",
        paragraph(
            "A ratio is torch's time / this library's: the geometric mean over layers, of medians "
            f"of {counted_as(options.rounds, 'round', 'rounds')}.",
            "All programs of a layer run in turns, in both orders; freed memory is kept.",
            "Building lists of the weights and packing the maps are included. Choosing which "
            "numbers are zero (pruning) is not.",
            "`dense` has no zeros: the gain of the kernel alone.",
            "X has the zeros of ReLU: half of it, at random.",
        ),
    ]
    for group in first:
        lines += ["", f"## {group.title}", "", ratios(group, found)]
    lines += ["", "## Beside SparseProp", "", *beside(found, sparseprop)]
    lines += ["", "## Layer by layer", "", *by_layer(found)]
    return "\n".join(lines) + "\n"


def paragraph(*sentences: str) -> str:
    """Lines of at most 100 characters."""
    return textwrap.fill(" ".join(sentences), 100, break_on_hyphens=False)


def ratio(found: Found, group: Group, product: str, program: str) -> str:
    """Geometric mean of torch's time over the program's; a dash if it was not measured."""
    measured = [times for times in found[group].values() if program in times]
    mean = geometric_mean(times[product] / times[program] for times in measured)
    return f"{mean:.2f}" if measured else "–"


def in_words(threads: int) -> str:
    """The number and the word for it."""
    return counted_as(threads, "thread", "threads")


def ratios(group: Group, found: Mapping[int, Found]) -> str:
    """A row for each product and operand with zeros, and torch again as the control."""
    rows = []
    for product in group.products:
        for zeros in (AGAIN, *(row.zeros for row in group.rows if row.product == product)):
            cells = (ratio(of, group, product, f"{product}, {zeros}") for of in found.values())
            rows.append([product, zeros, *cells])
    return table(("product", "zeros", *map(in_words, found)), rows, markdown=True)


def beside(found: Mapping[int, Found], version: str | None) -> list[str]:
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
    rows = [
        [group.title, row.product, row.zeros]
        + [
            ratio(of, group, row.product, program)
            for of in found.values()
            for program in (row.theirs, str(row))
        ]
        for group in next(iter(found.values()))
        for row in group.rivalry
    ]
    titles = [
        f"{who}, {in_words(threads)}" for threads in found for who in ("SparseProp", "this library")
    ]
    return [how, "", table(("layers", "product", "zeros", *titles), rows, markdown=True)]


def by_layer(found: Mapping[int, Found]) -> Iterator[str]:
    """Torch's milliseconds and the ratios, with the first number of threads."""
    threads, first = next(iter(found.items()))
    yield f"With {in_words(threads)}: torch's milliseconds, and torch's time / time."
    for group, layers in first.items():
        shown = [row for row in group.rows if "dense" not in row.zeros]
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
