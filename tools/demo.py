"""Dense training against sparse training on scikit-learn's digits: minutes on two CPU cores.

Every strategy trains the network of configs/demo_digits.py from the same seeds for the same number
of epochs. Printed and written to --out: accuracy, the share of multiply-adds that each GEMM keeps
(measured on the trained model and a real batch), and the time of the weight gradients against
PyTorch's dense ones.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.hooks import Hook
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import fst
from fst.basics.arguments import positive
from fst.engine import Digits, Runner
from fst.layers.modules import SparseConv2d
from fst.ops.alternating import lattices
from fst.ops.prune import prune_grad_output, prune_weight
from fst.rules import masks
from fst.rules.alternating import Alternating

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo_digits.py"
GEMMS = ("output", "grad_input", "grad_weight")
COLUMNS = ("strategy", "accuracy %", *GEMMS, "dW time")
TIMED_BATCH = 256


class Call(NamedTuple):
    """What one convolution saw in one training step."""

    layer: nn.Conv2d
    input: Tensor
    grad_output: Tensor
    computes_grad_input: bool

    @property
    def macs(self) -> int:
        """Multiply-adds of each of its GEMMs, per sample."""
        return self.layer.weight.numel() * self.grad_output.shape[2:].numel()


@dataclass
class Result:
    """What one strategy achieved; curves are per seed and epoch."""

    accuracy: list[list[float]] = field(default_factory=list)
    loss: list[list[float]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    time_ratio: float = 1.0

    @property
    def final(self) -> list[float]:
        """Accuracy after the last epoch, per seed."""
        return [curve[-1] for curve in self.accuracy]


class CurveHook(Hook):
    """Collects loss and accuracy of each epoch and moves the progress bar."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance
        self.accuracy: list[float] = []
        self.loss: list[float] = []

    def after_train_epoch(self, runner: Runner) -> None:
        """The epoch's mean loss."""
        history = runner.message_hub.get_scalar("train/loss")
        self.loss.append(float(history.mean(len(runner.train_dataloader))))
        self.advance()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """The test accuracy."""
        self.accuracy.append(metrics["accuracy/top1"])


def train(strategy: str, seed: int, arguments: argparse.Namespace, hook: CurveHook) -> nn.Module:
    """One run; returns the trained network."""
    config = Config.fromfile(CONFIG)
    last = config.train_cfg.max_epochs
    for scheduler in config.param_scheduler:  # stretched or shrunk to the epochs asked for
        if scheduler.end == last:
            scheduler.end = arguments.epochs
            scheduler.T_max = arguments.epochs - scheduler.begin
    config.train_cfg.max_epochs = arguments.epochs
    config.sparsity.strategy = strategy
    config.randomness.seed = seed
    config.experiment_name = f"{strategy}_seed{seed}_{time.time_ns()}"
    config.work_dir = str(arguments.out / f"{strategy}_seed{seed}")
    config.log_level = "ERROR"
    runner = Runner.from_cfg(config)
    runner.register_hook(hook)
    return runner.train().architecture


def timed_batch() -> tuple[Tensor, Tensor]:
    """Images in the range the network was trained on, and their labels."""
    config = Config.fromfile(CONFIG)
    options = {k: v for k, v in config.train_dataloader.dataset.items() if k != "type"}
    samples, scale = Digits(**options, subset=TIMED_BATCH), config.model.data_preprocessor
    return (samples.images - scale.mean[0]) / scale.std[0], samples.labels


def record_step(network: nn.Module, images: Tensor, labels: Tensor) -> list[Call]:
    """Inputs and output gradients of all convolutions in one training step."""
    calls: list[Call] = []

    def forward_hook(layer: nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        needs_gradient = inputs[0].requires_grad
        input = inputs[0].detach()
        output.register_hook(
            lambda gradient: calls.append(Call(layer, input, gradient.detach(), needs_gradient))
        )

    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    handles = [layer.register_forward_hook(forward_hook) for layer in convolutions]
    try:
        F.cross_entropy(network.train()(images), labels).backward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def kept_share(call: Call, gemm: str) -> float:
    """Measured density of the pruned operand of one GEMM of one convolution."""
    layer = call.layer
    rule = layer.strategy.rule(gemm) if isinstance(layer, SparseConv2d) else None
    if rule is None:
        return 1.0
    if rule.operand == "weight":
        weight = layer.weight.detach()
        pruned = prune_weight(
            weight, layer.strategy, layer.groups, weight.dtype, mask=layer.output_mask()
        )
        return _nonzero(getattr(pruned, gemm)) / _nonzero(weight)
    if rule.operand == "grad_output":
        pruned = prune_grad_output(call.grad_output, rule, gemm, layer.groups, None)
        return _nonzero(pruned) / _nonzero(call.grad_output)
    height, width = call.grad_output.shape[2:]
    if isinstance(rule, Alternating):
        phase = 0 if rule.phase == "random" else rule.phase
        kept = torch.zeros(height, width)
        for p in lattices(rule, phase, height, width):
            kept[p.row :: p.row_step, p.column :: p.column_step] = 1
        return kept.mean().item()
    columns = F.unfold(call.input, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return masks.nm_mask(columns, rule.n, rule.m, 2).float().mean().item()


def _nonzero(tensor: Tensor) -> int:
    return max(int(torch.count_nonzero(tensor)), 1)


def describe_kept(calls: Sequence[Call]) -> dict[str, str]:
    """Per GEMM: the pruned operand and the share of multiply-adds kept, over all convolutions."""
    texts = {}
    for gemm in GEMMS:
        counted = [c for c in calls if gemm != "grad_input" or c.computes_grad_input]
        total = sum(call.macs for call in counted)
        share = sum(call.macs * kept_share(call, gemm) for call in counted) / total
        rules = [
            call.layer.strategy.rule(gemm)
            for call in counted
            if isinstance(call.layer, SparseConv2d)
        ]
        operand = next((rule.operand for rule in rules if rule is not None), None)
        texts[gemm] = "dense" if operand is None else f"{operand} {100 * share:.0f} %"
    return texts


def weight_gradient(call: Call, strategy: fst.Strategy | None) -> Callable[[], Any]:
    """The weight gradient of one convolution, by stock PyTorch if `strategy` is None."""
    layer, weight = call.layer, call.layer.weight.detach().requires_grad_()
    geometry = (layer.stride, layer.padding, layer.dilation, layer.groups)
    if strategy is None:
        output = F.conv2d(call.input, weight, None, *geometry)
    else:
        output = fst.sparse_conv2d(call.input, weight, None, *geometry, strategy)
    return lambda: torch.autograd.grad(output, weight, call.grad_output, retain_graph=True)


def time_weight_gradients(calls: dict[str, list[Call]], repeats: int) -> dict[str, float]:
    """Time over PyTorch's dense one, all convolutions of the network together.

    Each turn measures all of them, in alternating order; the median of the turns' ratios is
    returned.
    """
    reference = next(iter(calls.values()))
    work: dict[str | None, list[Callable[[], Any]]] = {
        None: [weight_gradient(call, None) for call in reference]
    }
    for name, recorded in calls.items():
        strategies = [getattr(call.layer, "strategy", None) for call in recorded]
        work[name] = [  # on the same tensors
            weight_gradient(call, strategy)
            for call, strategy in zip(reference, strategies, strict=True)
        ]
    turns: list[dict[str | None, float]] = []
    for turn in range(repeats + 2):
        seconds: dict[str | None, float] = {}
        for name in work if turn % 2 else reversed(work):
            start = time.perf_counter()
            for gradient in work[name]:
                gradient()
            seconds[name] = time.perf_counter() - start
        turns.append(seconds)
    timed = turns[2:]  # the first two warm up
    return {name: statistics.median(turn[name] / turn[None] for turn in timed) for name in calls}


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """The table's body."""
    body = []
    for name, result in results.items():
        accuracy = f"{statistics.mean(result.final):.1f}"
        if len(result.final) > 1:
            accuracy += f" ± {(max(result.final) - min(result.final)) / 2:.1f}"
        kept = [result.kept[gemm] for gemm in GEMMS]
        body.append((name, accuracy, *kept, f"{result.time_ratio:.2f} x"))
    return body


def write_markdown(
    results: dict[str, Result], arguments: argparse.Namespace, seconds: float
) -> Path:
    """The table, with what is needed to repeat it."""
    lines = [
        "# Sparse against dense training on scikit-learn's digits",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row) + " |" for row in rows(results)),
        "",
        f"Test accuracy (360 images) after {arguments.epochs} epochs: mean ± half the range of "
        f"{arguments.seeds} seed(s). {', '.join(GEMMS)}: the pruned operand and the share of "
        "multiply-adds kept, measured. dW time: that of the weight gradients relative to PyTorch's "
        f"dense ones, batch {TIMED_BATCH}, median of {arguments.repeats} turns in "
        "alternating order.",
        "",
        "![Test accuracy and training loss](curves.png)",
        "",
        f"`{' '.join(['python', 'tools/demo.py', *sys.argv[1:]])}`: {seconds:.0f} s with "
        f"{torch.get_num_threads()} thread(s), Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}, {platform.machine()}.",
        "",
    ]
    path = arguments.out / "table.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def plot(results: dict[str, Result], out: Path) -> Path:
    """Accuracy and loss against the epoch: mean over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    panels = (("accuracy", "test accuracy %"), ("loss", "training loss"))
    for axis, (quantity, label) in zip(axes, panels, strict=True):
        for name, result in results.items():
            curves = torch.tensor(getattr(result, quantity))
            epochs = range(1, curves.shape[1] + 1)
            (line,) = axis.plot(epochs, curves.mean(0), label=name)
            low, high = curves.amin(0), curves.amax(0)
            axis.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=80)
    axes[0].legend()
    path = out / "curves.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train dense and sparse networks on scikit-learn's digits and compare them."
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["dense", "srste", "fst", "sdgp"],
        choices=fst.list_strategies(),
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
    arguments = parser.parse_args(argv)
    if arguments.epochs < 2:
        parser.error("argument --epochs: 1 is too few, the first epoch warms up; use 2 or more")
    arguments.strategies = list(dict.fromkeys(arguments.strategies))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, measures, prints and writes."""
    arguments = parse(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    console = Console()
    start = time.perf_counter()
    results = {name: Result() for name in arguments.strategies}
    calls: dict[str, list[Call]] = {}
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, remaining:"),
        TimeRemainingColumn(),
    )
    images, labels = timed_batch()
    with Progress(*columns, console=console) as progress:
        total = len(results) * arguments.seeds * arguments.epochs
        task = progress.add_task("", total=total)
        for seed in range(arguments.seeds):
            for name, result in results.items():
                progress.update(task, description=f"{name}, seed {seed}")
                hook = CurveHook(lambda: progress.advance(task))
                network = train(name, seed, arguments, hook)
                result.accuracy.append(hook.accuracy)
                result.loss.append(hook.loss)
                calls[name] = record_step(network, images, labels)
        progress.update(task, description="measuring")
        ratios = time_weight_gradients(calls, arguments.repeats)
        for name, result in results.items():
            result.kept, result.time_ratio = describe_kept(calls[name]), ratios[name]

    table = Table(
        *COLUMNS,
        box=box.SIMPLE,
        pad_edge=False,
        title="Digits: what training sparsely costs and saves",
    )
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    seconds = time.perf_counter() - start
    written = [write_markdown(results, arguments, seconds), plot(results, arguments.out)]
    console.print(f"{seconds:.0f} s. Written: {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
