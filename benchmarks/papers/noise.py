"""Noise that a sampled backward pass adds, layer by layer, beside the noise between batches.

    python benchmarks/papers/noise.py CONFIG --checkpoint RUN/epoch_5.pth --batch-size 128

The variance of a gradient over draws is divided by its variance over batches. 1 means that sampling
doubles the noise of a training. dW: all layers draw, and each layer's own gradient is compared. dX:
one layer draws alone, and the gradients of the weights in front of it are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model_under_test import ModelUnderTest, add_model_options, same_draws, tested_model
from paper import add_layers, main
from torch import Tensor, nn

import fst
from fst.basics.arguments import positive
from fst.basics.selectors import selected
from fst.lab.reporting.document import Document
from fst.layers.modules import sparse_layers
from fst.rules.sampled import Sampled
from fst.training.engine.model import sparse_root

KEPT = (0.5, 0.25)
ROUNDING = 1e-9  # up to this, a layer's gradient differs by rounding alone
Gradients = dict[str, Tensor]  # of the weights, by the names of their layers


class Drawing:
    """A copy of the model under test whose gradients are exact, but for layers that draw.

    Args:
        rules: grad_weight or grad_input -> layer -> how it draws.
    """

    def __init__(
        self, tested: ModelUnderTest, strategy: str, seed: int, **rules: Mapping[str, Sampled]
    ) -> None:
        self.tested = tested
        self.seed = seed
        self.model, _ = tested.converted(fst.get_strategy(strategy))
        self.layers = sparse_layers(sparse_root(self.model))
        self.positions: dict[str, int] = {}  # of the first batch
        for name, layer in self.layers.items():
            own: dict[str, Any] = {key: rule[name] for key, rule in rules.items() if name in rule}
            layer.strategy = replace(layer.strategy, **own)
            layer.register_forward_hook(lambda _, __, y, name=name: self._count(name, y))

    def _count(self, name: str, output: Tensor) -> None:
        channels = output.shape[1 if isinstance(self.layers[name], nn.Conv2d) else -1]
        self.positions.setdefault(name, output.numel() // channels)

    def gradients(self, batch: int, draw: int = 0) -> Gradients:
        """Of one batch."""
        self.model.zero_grad(set_to_none=True)
        with same_draws(self.seed + draw, self.tested.device):
            self.tested.loss(self.model, self.tested.batches[batch]).backward()
        found = {name: layer.weight.grad for name, layer in self.layers.items()}
        return {name: grad.double() for name, grad in found.items() if grad is not None}

    def between_batches(self) -> dict[str, float]:
        """Layer -> the variance of its gradient over the batches."""
        found = [self.gradients(batch) for batch in range(len(self.tested.batches))]
        variance = {}
        for name in found[0]:
            mean = sum(grads[name] for grads in found) / len(found)
            squares = [float((grads[name] - mean).square().sum()) for grads in found]
            variance[name] = sum(squares) / (len(found) - 1)
        return variance

    def noise(self, exact: Drawing, draws: int) -> dict[str, float]:
        """Layer -> mean of ‖drawn − exact‖² over ``draws``, each of the next batch."""
        squares: dict[str, list[float]] = {}
        for draw in range(draws):
            batch = draw % len(self.tested.batches)
            true = exact.gradients(batch, draw)
            for name, grad in self.gradients(batch, draw).items():
                squares.setdefault(name, []).append(float((grad - true[name]).square().sum()))
        return {name: statistics.fmean(values) for name, values in squares.items()}


def ratios(noise: Mapping[str, float], variance: Mapping[str, float]) -> dict[str, float]:
    """Layer -> noise / variance, where the gradient varies at all."""
    return {name: noise[name] / variance[name] for name in noise if variance.get(name)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script's options."""
    add_model_options(parser, batches=8, batch_size=128)
    add_layers(parser, None)
    parser.add_argument(
        "--strategy", default="dense", help="with an exact dW, such as fst_w (default: dense)"
    )
    parser.add_argument("--draws", type=positive, default=8, help="per setting (default: 8)")
    parser.add_argument(
        "--no-grad-input", action="store_true", help="leave dX out, which takes most of the time"
    )


def run(options: argparse.Namespace) -> Document:
    """Measure every layer."""
    os.environ["FST_AUTOTUNE"] = "0"  # every layer draws, whatever time it takes
    if options.batches < 2:
        raise ValueError(f"--batches {options.batches}: a variance between batches needs 2.")
    own = fst.get_strategy(options.strategy)
    if own.grad_weight or (own.grad_input and not options.no_grad_input):
        raise ValueError(
            f"--strategy {options.strategy!r} computes gradients by rules of its own, which a draw "
            "would replace: take one with an exact dW, and --no-grad-input where it prunes dX."
        )
    tested = tested_model(options)
    exact = Drawing(tested, options.strategy, options.seed)
    variance = exact.between_batches()
    names = [name for name in exact.layers if variance.get(name)]
    if options.layers:
        chosen = selected("layers", options.layers, exact.layers, "sparse layer")
        names = [name for name in names if name in chosen]
    if not names:
        raise ValueError("no layer that was chosen has a gradient that varies between batches.")

    def added(**rules: Mapping[str, Sampled]) -> dict[str, float]:
        drawing = Drawing(tested, options.strategy, options.seed, **rules)
        return ratios(drawing.noise(exact, options.draws), variance)

    columns = [added(grad_weight=dict.fromkeys(names, Sampled(keep=keep))) for keep in KEPT]
    rows = []
    for name in names:
        parts: list[float | None] = [column[name] for column in columns]
        if not options.no_grad_input:
            in_front = added(grad_input={name: Sampled(keep=KEPT[0])}).values()
            reached = [ratio for ratio in in_front if ratio > ROUNDING]
            parts += [statistics.median(reached), max(reached)] if reached else [None, None]
        rows.append([name, exact.positions[name], *parts])
    medians = [statistics.median(column[n] for n in names) for column in columns]
    result = Document(
        "The noise of sampled backward passes",
        f"{tested.title}; {options.strategy}; {options.batches} batches of {options.batch_size}, "
        f"{options.draws} draws. Variance over draws / variance between batches.",
    )
    heads = ["layer", "positions", "dW, 1/2", "dW, 1/4"]
    if not options.no_grad_input:
        heads += ["dX, 1/2: median in front", "… largest"]
    result.add_table("Per layer", heads, rows)
    result.add_table("Median of the layers", ["dW, 1/2", "dW, 1/4"], [medians])
    return result


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
