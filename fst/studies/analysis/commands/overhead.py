"""What pruning each operand costs in time, against a training step (FST, Tables 2 and 6)."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from fst.basics.arguments import positive
from fst.engine.model import sparse_root
from fst.studies.analysis import plots
from fst.studies.analysis.commands.options import (
    add_pattern,
    add_precision,
    add_subject,
    subject_of,
)
from fst.studies.analysis.overhead import SECONDS_ON_A100, pruning_functions
from fst.studies.analysis.record import record_step
from fst.studies.analysis.result import Plot, Result
from fst.studies.analysis.saliency import Precision
from fst.studies.arguments import amp_dtype
from fst.studies.benchmark import compare

STEP = "training step, dense"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=1, batch_size=32, needs_data=False)
    add_pattern(parser)
    add_precision(parser, "the training step")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="rounds; the median counts (default: 15)"
    )


def run(options: argparse.Namespace) -> Result:
    """Time everything in turns, every other round in reverse order."""
    subject = subject_of(options)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    model = subject.copied()
    loss = precision.loss_of(subject.loss, model, subject.batches[0])
    step = _step(model, loss, precision.scale)
    layers = record_step(sparse_root(model), loss).layers
    pruning = pruning_functions(layers, options.n, options.m, dtype=precision.dtype)
    pruning = {name: torch.no_grad()(function) for name, function in pruning.items()}
    times = compare({STEP: step, **pruning}, options.repeats, subject.device)
    whole = times[STEP].median
    result = Result(
        "Time of pruning against a training step",
        f"{subject.title}; batch of {options.batch_size} images, {options.dtype}, "
        f"{torch.get_num_threads()} CPU threads, {subject.device}; all convolutions that a "
        f"gradient reaches; median of {options.repeats} rounds in alternating order.",
    )
    result.add_table(
        "Measured",
        ["operand", "ms", "lower quartile", "upper quartile", "share of the step"],
        [[name, *time, time.median / whole] for name, time in times.items()],
        "Sorting S(Xᵀ) needs im2col(X) itself, whose time is given apart. The fixed mask costs "
        "nothing but, for 1x1 kernels, a copy of the kept half; the strided weight gradient reads "
        "the kept positions in place.",
    )
    published = SECONDS_ON_A100["training step"]
    result.add_table(
        "FST, Tables 2 and 6 (published: A100, ResNet-18, batch 256)",
        ["operand", "s", "share of the step"],
        [[name, seconds, seconds / published] for name, seconds in SECONDS_ON_A100.items()],
    )
    names = [name for name in times if name != STEP]
    figure = plots.overhead(names, [times[name].median / whole for name in names])
    caption = "Time of pruning each operand of all layers once, over that of a dense training step."
    result.plots.append(Plot("Overhead of pruning", "overhead", caption, figure))
    return result


def _step(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], scale: float
) -> Callable[[], None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (loss() * scale).backward()
        optimizer.step()

    return step
