"""Time of pruning each operand, against a training step (FST, Tables 2 and 6).

python benchmarks/papers/overhead.py --model resnet18 --batch-size 32 --threads 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from model_under_test import add_model_options, tested_model
from paper import Precision, add_pattern, add_precision, drawing, main
from record import LayerRecord, padded_input, record_step
from torch import Tensor, nn

from fst.backends.choice import compute
from fst.backends.timing import compare
from fst.basics.arguments import positive
from fst.lab.document import Document
from fst.lab.figures import COLOURS, INK
from fst.lab.model import amp_dtype
from fst.ops.operands import PruneWeight
from fst.ops.prune import prune_grad_output
from fst.rules import masks
from fst.rules.alternating import Alternating
from fst.rules.nm import NM
from fst.rules.rule import Lattice
from fst.rules.strategy import Strategy
from fst.training.engine.model import sparse_root

SECONDS_ON_A100 = {  # FST, Tables 2 and 6: ResNet-18, batch 256
    "training step": 0.184,
    "S(W)": 0.0017,
    "S(Wᵀ)": 0.0017,
    "shift(dY)": 0.0008,
    "S(dY)": 0.29,
    "S(Xᵀ), sorted": 0.48,
}
STEP = "training step, dense"


def pruning_functions(
    records: Mapping[str, LayerRecord],
    n: int = 2,
    m: int = 4,
    dtype: torch.dtype | None = None,
) -> dict[str, Callable[[], object]]:
    """Functions that prune one operand of all recorded layers, once each, as a step would.

    Frozen layers have no grad_weight, and first layers no grad_input: they take no part in those.
    ``dtype`` is autocast's in that step; None: it has none, and operands are as its weights.
    """
    rule = Alternating()
    of_weight = Strategy("output", output=NM("weight", n, m))
    of_transpose = Strategy("grad_input", grad_input=NM("weight", n, m))
    of_gradient = NM("grad_output", n, m)

    def cast(layer: nn.Conv2d, operand: Tensor) -> Tensor:
        return operand.to(dtype or layer.weight.dtype)

    layers = [record.layer for record in records.values()]
    calls = [
        (record.layer, call, cast(record.layer, call.grad_output))
        for record in records.values()
        for call in record.calls
    ]
    backward = [(layer, grad) for layer, call, grad in calls if call.grad_input is not None]
    trained = [(layer, grad) for layer, _, grad in calls if layer.weight.requires_grad]
    behind = list({id(layer): layer for layer, _ in backward}.values())
    placed = [
        (*padded_input(layer, cast(layer, call.input)), layer, grad)
        for layer, call, grad in calls
        if layer.weight.requires_grad
    ]

    def weights(some: list[nn.Conv2d], strategy: Strategy) -> None:
        for layer in some:
            weight = layer.weight.detach()
            compute(PruneWeight(weight, strategy, layer.groups, dtype or weight.dtype))

    def gradients(some: list[tuple[nn.Conv2d, Tensor]], gemm: str) -> None:
        for layer, grad_output in some:
            prune_grad_output(grad_output, of_gradient, gemm, layer.groups, None)

    def im2col(prune: bool) -> None:
        for input, geometry, layer, _ in placed:
            columns = F.unfold(
                input, layer.kernel_size, geometry.dilation, geometry.padding, geometry.stride
            )
            if prune:
                masks.apply_mask(columns, masks.nm_mask(columns, n, m, 2))

    def keep() -> list[tuple[Lattice, ...]]:
        return [
            rule.kept_positions(*grad_output.shape[2:], phase=0) or () for *_, grad_output in placed
        ]

    kept = keep()

    def shift() -> None:
        for (*_, grad_output), lattices in zip(placed, kept, strict=True):
            rule.summed(grad_output, lattices, 0)

    return {
        "S(W)": lambda: weights(layers, of_weight),
        "S(Wᵀ)": lambda: weights(behind, of_transpose),
        "S(dY) for grad_input": lambda: gradients(backward, "grad_input"),
        "S(dY) for grad_weight": lambda: gradients(trained, "grad_weight"),
        "im2col(X)": lambda: im2col(False),
        "im2col(X) and S(Xᵀ), sorted": lambda: im2col(True),
        "S(Xᵀ), fixed mask": keep,
        "shift(dY): pair sums": shift,
    }


def draw(names: Sequence[str], shares: Sequence[float]) -> Figure:
    """Horizontal bars: time over that of a dense training step."""
    figure = drawing(7.5, 0.38 * len(names) + 1.1)
    axis = figure.subplots()
    axis.barh(names, shares, color=COLOURS[0])
    for place, share in enumerate(shares):
        axis.annotate(
            f"{share:.2%}",
            (share, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axis.set_xlabel("time over that of a dense training step")
    axis.grid(visible=False, axis="y")
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model_options(parser, batches=1, batch_size=32)
    add_pattern(parser)
    add_precision(parser, "the training step")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="rounds; the median counts (default: 15)"
    )


def run(options: argparse.Namespace) -> Document:
    """Time everything in turns, every other round in reverse order."""
    tested = tested_model(options)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    model = tested.copied()
    loss = precision.loss_of(tested.loss, model, tested.batches[0])
    step = _step(model, loss, precision.scale)
    layers = record_step(sparse_root(model), loss).layers
    pruning = pruning_functions(layers, options.n, options.m, dtype=precision.dtype)
    pruning = {name: torch.no_grad()(function) for name, function in pruning.items()}
    times = compare({STEP: step, **pruning}, options.repeats, tested.device)
    whole = times[STEP].median
    result = Document(
        "Time of pruning against a training step",
        f"{tested.title}; batch of {options.batch_size} images, {options.dtype}, "
        f"{torch.get_num_threads()} CPU threads, {tested.device}; all convolutions that a "
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
    figure = draw(names, [times[name].median / whole for name in names])
    caption = "Time of pruning each operand of all layers once, over that of a dense training step."
    result.add_figure("Overhead of pruning", "overhead", caption, figure, options.out)
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


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
