"""Dense training against sparse training on scikit-learn's digits: minutes on two CPU cores.

A small grid of `ablation`: every strategy trains the network of configs/demo_digits.py from the
same seeds. Printed and written to --out: accuracy, the share of multiply-adds that each GEMM keeps,
and the time of the weight gradients against PyTorch's dense ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from fst.basics.arguments import positive
from fst.basics.text import table
from fst.checkpoint import write_text_atomically
from fst.engine.checkpoint import newest_checkpoint
from fst.engine.packaged import config_path
from fst.rules.strategy import GEMMS, Strategy
from fst.strategies.registry import get_strategy, list_strategies
from fst.studies.ablation.configs import make_runs
from fst.studies.ablation.folders import RunFolder
from fst.studies.ablation.grid import Grid, Metric, Setting
from fst.studies.ablation.plots import draw_training
from fst.studies.ablation.results import Results, collect
from fst.studies.ablation.run import TRAIN, Trainer
from fst.studies.analysis.commands.macs import count_step
from fst.studies.analysis.subject import Subject, from_config
from fst.studies.arguments import command_of
from fst.studies.benchmark import PLAIN, layer_shapes, time_layer
from fst.studies.reporting.document import Document, Table
from fst.studies.reporting.environment import cores, machine, versions
from fst.studies.reporting.markdown import markdown

TITLE = "Sparse against dense training on scikit-learn's digits"
ACCURACY = Metric("accuracy/top1", "accuracy %")
COLUMNS = ["strategy", ACCURACY.label, *GEMMS, "dW time"]
TIMED_BATCH = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print and write. Exit status 1 if a run failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    console, start = Console(), time.perf_counter()
    torch.set_num_threads(arguments.threads)
    grid = _grid(arguments, Path(config_path("fst::configs/demo_digits.py")))
    trainer = Trainer(
        work_dir=arguments.out,
        train=TRAIN,
        jobs=max(1, cores() // arguments.threads),
        threads=arguments.threads,
        metric=ACCURACY.key,
        console=console,
    )
    try:
        runs = make_runs(grid, list(grid.settings), grid.seeds)
    except ValueError as error:
        parser.error(str(error))
    for run in runs:
        if trainer.folder(run).state(run) == "changed":
            trainer.folder(run).put_aside()
    if trainer.train(runs):
        return 1
    console.print("measuring …")
    results = collect(grid, arguments.out, list(grid.settings))
    command = command_of("demo", argv)
    document = _document(results, arguments, command)
    print(f"\n{table(COLUMNS, document.tables[0].rows)}\n")
    write_text_atomically(markdown(document), arguments.out / "table.md")
    names = ", ".join(str(arguments.out / name) for name in ("table.md", "curves.png"))
    console.print(f"{time.perf_counter() - start:.0f} s. Written: {names}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fst demo",
        description="Train dense and sparse networks on scikit-learn's digits and compare them.",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["dense", "srste", "fst", "sdgp"],
        choices=list_strategies(),
        help="what to compare (default: dense srste fst sdgp)",
    )
    parser.add_argument("--epochs", type=positive, default=8, help="per run (default: 8)")
    parser.add_argument("--seeds", type=positive, default=2, help="runs each (default: 2)")
    parser.add_argument(
        "--threads", type=positive, default=1, help="of PyTorch (default: 1, robust on busy cores)"
    )
    parser.add_argument("--repeats", type=positive, default=20, help="timings (default: 20)")
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/demo"), help="folder (default: work_dirs/demo)"
    )
    return parser


def _grid(arguments: argparse.Namespace, config: Path) -> Grid:
    """The strategies as settings of the demo's config."""
    return Grid(
        path=config,
        title=TITLE,
        description="",
        base=config,
        settings={
            name: Setting(name, name, config, sparsity={"strategy": name})
            for name in arguments.strategies
        },
        seeds=tuple(range(arguments.seeds)),
        metrics=(ACCURACY,),
        epochs=arguments.epochs,
    )


def _document(results: Results, arguments: argparse.Namespace, command: str) -> Document:
    """The table and the curves of the trained runs, with what is needed to repeat them."""
    strategies = {name: get_strategy(name) for name in results.grid.settings}
    subjects = {name: _trained(arguments.out, name) for name in strategies}
    times = _grad_weight_times(next(iter(subjects.values())), strategies, arguments.repeats)
    rows = [
        [name, str(results.summary(name, ACCURACY)), *_kept(subject), f"{times[name]:.2f} x"]
        for name, subject in subjects.items()
    ]
    caption = (
        f"Test accuracy (359 images) after {arguments.epochs} epochs: mean ± standard deviation of "
        f"{arguments.seeds} seed(s). {', '.join(GEMMS)}: the pruned operand and the share of the "
        "convolutions' multiply-adds kept. dW time: that of the convolutions' weight gradients "
        f"over PyTorch's dense ones, batch {TIMED_BATCH}, medians of {arguments.repeats} turns in "
        f"alternating order, {arguments.threads} thread(s)."
    )
    return Document(
        title=TITLE,
        command=command,
        versions={**versions(), "machine": machine()},
        tables=[Table("Accuracy, pruning and time", COLUMNS, rows, caption)],
        figures=[draw_training(results, arguments.out)],
    )


def _trained(work_dir: Path, name: str) -> Subject:
    """The network of a strategy's first seed, with a batch of its training images."""
    folder = RunFolder.of(work_dir, name, seed=0)
    checkpoint = newest_checkpoint(folder.path)
    return from_config(str(folder.config), checkpoint=checkpoint, batch_size=TIMED_BATCH)


def _kept(subject: Subject) -> list[str]:
    """For each GEMM the pruned operand, and the share of multiply-adds that is left."""
    report = count_step(subject, subject.strategy)
    rules = {gemm: subject.strategy.rule(gemm) for gemm in GEMMS}
    return [
        f"{rule.operand} {100 * report.total(gemm).share_left:.0f} %" if rule else "dense"
        for gemm, rule in rules.items()
    ]


def _grad_weight_times(
    subject: Subject, strategies: Mapping[str, Strategy], repeats: int
) -> dict[str, float]:
    """Time of the weight gradients of all convolutions over that of PyTorch's dense ones."""
    model = subject.model
    shapes = layer_shapes(model, lambda: subject.loss(model, subject.batches[0]))
    spent = dict.fromkeys([PLAIN, *strategies], 0.0)
    for shape, count in shapes.items():
        times = time_layer(
            shape,
            count,
            {n: s for n, s in strategies.items() if shape.in_channels >= s.min_in_channels},
            device=subject.device,
            dtype=torch.float32,
            memory_format=torch.channels_last,
            repeats=repeats,
            parts=["grad_weight"],
        ).times["grad_weight"]
        for name in spent:
            spent[name] += count * times.get(name, times[PLAIN]).median
    return {name: spent[name] / spent[PLAIN] for name in strategies}
