"""Dense training against sparse training on cluttered digits: minutes on two CPU cores.

A small grid of `ablation`: every strategy trains the network of configs/demo.py from the
same seeds. Printed and written to --out is what one decides by: accuracy, the time of a training
step beside PyTorch's dense one, what is 2:4 at the end, and the multiply-adds each GEMM keeps.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from fst import get_strategy
from fst.api.fold import fold
from fst.api.pack import pack
from fst.api.verify import verify
from fst.backends.timing import Timing, compare
from fst.basics.arguments import user_errors
from fst.basics.text import table
from fst.cli.environment import cores
from fst.cli.options import lab as command_lines
from fst.cli.options.parsing import takes
from fst.cli.options.paths import config_path
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.grid import Grid, Metric, Setting, check_seeds
from fst.lab.ablation.results import Results, collect, draw_training
from fst.lab.ablation.runs import TRAIN, PlannedRun, as_trained, make_runs, train
from fst.lab.arguments import command_of
from fst.lab.benchmark.layers import PLAIN
from fst.lab.benchmark.steps import candidates
from fst.lab.document import Document, Table, made_with, markdown
from fst.lab.macs import count_step, total
from fst.lab.model import Training, from_config
from fst.layers.modules import sparse_layers
from fst.ops.cpp import missing
from fst.rules.strategy import GEMMS, Strategy
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.config import load_config
from fst.training.engine.export import deployable
from fst.training.engine.model import sparse_root
from fst.training.engine.trained import trained_model

CONFIG = "fst::configs/demo.py"
TITLE = "Sparse against dense training on cluttered digits"
ACCURACY = Metric("accuracy/top1", "accuracy %")
COLUMNS = ["strategy", ACCURACY.label, "time of a step", "2:4 at the end", *GEMMS]


@takes(command_lines.demo)
def main(arguments: argparse.Namespace) -> int:
    """Train, measure, print and write. Exit status 1 if a run failed, 2 for bad input."""
    with user_errors(arguments, lambda: "stopped; the same command goes on from here"):
        return _demonstrate(arguments, command_of("demo", arguments))


def _demonstrate(arguments: argparse.Namespace, command: str) -> int:
    start = time.perf_counter()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the times are a CPU's, and so are the trainings
    torch.set_num_threads(arguments.threads)
    grid = _grid(arguments)
    runs = make_runs(grid, list(grid.settings), grid.seeds)
    for run in runs:
        if run.changes(arguments.out):
            print(f"{run} was trained with another config: again")
            shutil.rmtree(run.folder(arguments.out), ignore_errors=True)
    jobs = max(1, cores() // arguments.threads)
    if not train(runs, arguments.out, jobs, str(arguments.threads), TRAIN):
        return 1
    print("measuring …", flush=True)
    results = collect(grid, arguments.out, list(grid.settings), grid.seeds)
    first = {run.setting: run for run in runs if run.seed == grid.seeds[0]}
    document = _document(results, first, arguments, command)
    print(f"\n{table(COLUMNS, document.tables[0].rows)}\n")
    write_text_atomically(markdown(document), arguments.out / "table.md")
    names = ", ".join(str(arguments.out / name) for name in ("table.md", "curves.png"))
    print(f"{time.perf_counter() - start:.0f} s. Written: {names}")
    print(f"\n{_packed(first, arguments.out)}")
    return 0


def _grid(arguments: argparse.Namespace) -> Grid:
    """The strategies as settings of the demo's config."""
    config = Path(config_path(CONFIG))
    return Grid(
        path=config,
        title=TITLE,
        settings={
            name: Setting(name, name, config, sparsity={"strategy": name})
            for name in arguments.strategies
        },
        metrics=(ACCURACY,),
        seeds=check_seeds(arguments.seeds, "--seeds"),
        epochs=arguments.epochs,
    )


def _document(
    results: Results, first: Mapping[str, PlannedRun], arguments: argparse.Namespace, command: str
) -> Document:
    """The table and the curves of the trained runs, with what is needed to repeat them.

    ``first``: each strategy's run of the first seed.
    """
    strategies = {name: get_strategy(name) for name in results.grid.settings}
    training = _training()
    times = _step_times(training, strategies, arguments.repeats)
    rows = [
        [
            name,
            _accuracy(results.summary(name, ACCURACY).values),
            _relative(times[name], times[PLAIN]),
            _pattern(sparse_root(_trained(first[name], arguments.out))),
            *_kept(training, strategy),
        ]
        for name, strategy in strategies.items()
    ]
    caption = (
        f"Test accuracy after {arguments.epochs} epochs: mean of {len(arguments.seeds)} seed(s), "
        f"and the lowest and highest of them. Time of a step: forward, backward and SGD, batch "
        f"{training.batch_shape[0]}, over PyTorch's dense step ({times[PLAIN]} ms): medians and "
        f"quartiles of {arguments.repeats} turns in alternating order, {arguments.threads} "
        "thread(s). 2:4 at the end: share of the convolutions' weights that lie in 2:4 layers of "
        f"the folded model. {', '.join(GEMMS)}: the pruned operand and the share of the "
        "convolutions' multiply-adds kept."
    )
    return Document(
        title=TITLE,
        command=command,
        made_with=made_with(),
        tables=[Table("Accuracy, time and pruning", COLUMNS, rows, caption)],
        figures=[draw_training(results, arguments.out)],
    )


def _training() -> Training:
    """The demo's network with a random batch of the size that it trains with."""
    loader = load_config(CONFIG).train_dataloader
    return from_config(CONFIG, loader.batch_size, (loader.dataset.size, loader.dataset.size))


def _trained(run: PlannedRun, work_dir: Path) -> nn.Module:
    return trained_model(as_trained(run.config), newest_checkpoint(run.folder(work_dir)))


def _step_times(
    training: Training, strategies: Mapping[str, Strategy], repeats: int
) -> dict[str, Timing]:
    """Milliseconds of PyTorch's and each strategy's training step, taken in turns."""
    ready = candidates(training, strategies).ready
    return compare({name: ready[name].step for name in ready}, repeats, training.device)


def _accuracy(values: Sequence[float]) -> str:
    """The mean, with the extremes of several seeds: an interval of two says nothing."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else mean


def _relative(timing: Timing, plain: Timing) -> str:
    """A time over PyTorch's median, with the quartiles."""
    median, low, high = (value / plain.median for value in timing)
    return f"{median:.2f} x ({low:.2f} to {high:.2f})"


def _pattern(trained: nn.Module) -> str:
    """The share of the convolutions' weights that lie in layers with 2:4 zeros, once folded."""
    layers = verify(fold(trained)).layers
    sizes = [math.prod(layer.shape) for layer in layers]
    sparse = sum(
        size for layer, size in zip(layers, sizes, strict=True) if layer.ok and layer.density < 1
    )
    return f"{100 * sparse / sum(sizes):.1f} %" if sparse else "nothing"


def _packed(runs: Mapping[str, PlannedRun], work_dir: Path) -> str:
    """The first network with 2:4 weights: its time for a batch, packed and dense."""
    for name, run in runs.items():
        model = deployable(_trained(run, work_dir))
        if not sparse_layers(model) or not any(w.pattern for w in verify(fold(model)).layers):
            continue
        if reason := missing():
            return f"fst.pack was not run: {reason}"
        shape = _training().batch_shape
        report = pack(model, torch.randn(shape)).report
        times = ", ".join(f"{kind} {timing} ms" for kind, timing in report.times.items())
        return f"inference of {name}'s network, batch {shape[0]}: {times}; {report.verdict}"
    return "no network with 2:4 weights was trained, so none was packed"


def _kept(training: Training, strategy: Strategy) -> list[str]:
    """For each GEMM the pruned operand, and the share of multiply-adds that is left."""
    counted = count_step(training, strategy, (nn.Conv2d,))
    rules = {gemm: strategy.rule(gemm) for gemm in GEMMS}
    return [
        f"{rule.operand} {100 * total(counted, gemm).share_left:.0f} %" if rule else "dense"
        for gemm, rule in rules.items()
    ]
