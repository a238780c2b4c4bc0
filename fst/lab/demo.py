"""Dense training against sparse training on cluttered digits: minutes on two CPU cores.

A small grid of `ablation`: every strategy trains the network of configs/demo.py from the
same seeds. Printed and written to --out is what one decides by: accuracy, the time of a training
step over PyTorch's dense one, what is 2:4 at the end, and what each GEMM keeps.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from fst import get_strategy
from fst.api.fold import fold
from fst.api.verify import verify
from fst.backends.timing import Timing, compare
from fst.basics.arguments import user_errors
from fst.basics.text import table
from fst.cli.environment import cores
from fst.cli.options.paths import config_path
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, Metric, Setting, check_seeds
from fst.lab.ablation.results import Results, collect, draw_training
from fst.lab.ablation.runs import PlannedRun, as_trained, make_runs, refuse_changed, train
from fst.lab.benchmark.layers import PLAIN
from fst.lab.benchmark.steps import candidates
from fst.lab.document import Document, command_of, made_with, markdown
from fst.lab.model import from_config
from fst.rules.rule import Rule
from fst.rules.strategy import GEMMS
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.config import load_config
from fst.training.engine.model import sparse_root
from fst.training.engine.trained import trained_model

CONFIG = "fst::configs/demo.py"
TITLE = "Sparse against dense training on cluttered digits"
ACCURACY = Metric("accuracy/top1", "accuracy %")
COLUMNS = ["strategy", ACCURACY.label, "time of a step", "2:4 at the end", *GEMMS]


def main(arguments: argparse.Namespace) -> int:
    """Train, measure, print and write. Exit status 1 if a run failed, 2 for bad input."""
    with user_errors(arguments, lambda: "stopped; the same command goes on from here"):
        return _demonstrate(arguments)


def _demonstrate(arguments: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the times are a CPU's, and so are the trainings
    torch.set_num_threads(arguments.threads)
    config, names, seeds = Path(config_path(CONFIG)), arguments.strategies, arguments.seeds
    grid = Grid(
        path=config,
        title=TITLE,
        settings={n: Setting(n, n, config, sparsity={"strategy": n}) for n in names},
        metrics=(ACCURACY,),
        seeds=check_seeds(seeds, "--seeds"),
        epochs=arguments.epochs,
    )
    runs = make_runs(grid, names, seeds)
    refuse_changed(runs, arguments.out, "--out")
    jobs = max(1, cores() // arguments.threads)
    if not train(runs, arguments.out, jobs, str(arguments.threads)):
        return 1
    print("measuring …", flush=True)
    first = {run.setting: run for run in runs if run.seed == seeds[0]}
    document = _document(collect(grid, arguments.out, names, seeds), first, arguments)
    print(f"\n{table(COLUMNS, document.tables[0].rows)}\n")
    write_text_atomically(markdown(document), arguments.out / "table.md")
    print(f"written: {arguments.out / 'table.md'}, {arguments.out / 'curves.png'}")
    return 0


def _document(
    results: Results, first: Mapping[str, PlannedRun], arguments: argparse.Namespace
) -> Document:
    """The table and the curves of the trained runs; ``first``: each strategy's first seed."""
    strategies = {name: get_strategy(name) for name in first}
    loader = load_config(CONFIG).train_dataloader
    training = from_config(CONFIG, loader.batch_size, (loader.dataset.size, loader.dataset.size))
    steps = {name: made.step for name, made in candidates(training, strategies).ready.items()}
    times = compare(steps, arguments.repeats, training.device)
    rows = []
    for name, strategy in strategies.items():
        run = first[name]
        checkpoint = newest_checkpoint(run.folder(arguments.out))
        trained = sparse_root(trained_model(as_trained(run.config), checkpoint))
        accuracy = _accuracy(results.summary(name, ACCURACY).values)
        step, kept = _relative(times[name], times[PLAIN]), map(_kept, map(strategy.rule, GEMMS))
        rows.append([name, accuracy, step, _pattern(trained), *kept])
    caption = (
        f"Test accuracy after {arguments.epochs} epochs: mean of {len(arguments.seeds)} seed(s), "
        f"and the lowest and highest of them. Time of a step: forward, backward and SGD, batch "
        f"{training.batch_shape[0]}, over PyTorch's dense step ({times[PLAIN]} ms): medians and "
        f"quartiles of {arguments.repeats} turns in alternating order, {arguments.threads} "
        "thread(s). 2:4 at the end: share of the convolutions' weights that lie in 2:4 layers of "
        f"the folded model. {', '.join(GEMMS)}: the pruned operand and the share of the "
        "multiply-adds that its rule keeps."
    )
    document = Document(TITLE, command=command_of("demo", arguments), made_with=made_with())
    document.add_table("Accuracy, time and pruning", COLUMNS, rows, caption)
    document.figures.append(draw_training(results, arguments.out))
    return document


def _accuracy(values: Sequence[float]) -> str:
    """The mean, with the extremes of several seeds: an interval of two says nothing."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else mean


def _relative(timing: Timing, plain: Timing) -> str:
    """A time over PyTorch's median, with the quartiles."""
    return "{:.2f} x ({:.2f} to {:.2f})".format(*(value / plain.median for value in timing))


def _pattern(trained: nn.Module) -> str:
    """The share of the convolutions' weights that lie in layers with 2:4 zeros, once folded."""
    layers = verify(fold(trained)).layers
    sizes = {layer.name: torch.Size(layer.shape).numel() for layer in layers}
    sparse = sum(sizes[layer.name] for layer in layers if layer.ok and layer.density < 1)
    return f"{100 * sparse / sum(sizes.values()):.1f} %" if sparse else "nothing"


def _kept(rule: Rule | None) -> str:
    return "dense" if rule is None else f"{rule.operand} {100 * rule.density:.0f} %"
