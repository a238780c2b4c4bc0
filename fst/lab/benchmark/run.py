"""What the options of `fst bench` ask for, measured: layers, training steps, memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fst.lab import benchmark
from fst.lab.arguments import amp_dtype, named_options, source_and_name
from fst.lab.benchmark.breakdown import break_down
from fst.lab.benchmark.layers import OP, PRUNING
from fst.lab.benchmark.measurements import Measurements
from fst.lab.benchmark.memory import measure_memory
from fst.lab.benchmark.steps import Training
from fst.models.named import build_architecture
from fst.rules.strategy import GEMMS, Strategy
from fst.strategies.registry import get_strategy

CLASSES = 1000  # of a model that is named


def from_name(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """A classifier of torchvision or timm on random images, and what the report says of it."""
    model = build_architecture(*source_and_name(options.model), num_classes=CLASSES)
    height, width = options.size or (224, 224)
    layers = options.layers or "conv"
    model = model.to(options.device, memory_format=torch.channels_last)
    images = torch.randn(options.batch, 3, height, width, device=options.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (options.batch,), device=options.device)

    def loss(trained: nn.Module) -> Tensor:
        return F.cross_entropy(trained(images), labels)

    subject = {
        "model": options.model,
        "batch": options.batch,
        "size": f"{height}x{width}",
        "layers": layers,
        "memory_format": str(torch.channels_last),
    }
    selection = {"layers": layers}
    training = Training(model, loss, selection=selection, amp_dtype=amp_dtype(options.dtype))
    return training, subject


def from_config(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """The model of a training config on random data, and what the report says of it."""
    from fst.engine.config import load_config, read_sparsity
    from fst.engine.model import sparse_root
    from fst.engine.sample import sample_step

    if options.layers is not None:
        raise ValueError(f"--layers {options.layers}: the config says which layers itself.")
    config = load_config(options.model)
    step = sample_step(config, options.batch, options.size, options.device)
    _, selection = read_sparsity(config)
    named = {key: names for key, names in selection.items() if names is not None}
    height, width = step.batch_shape[2:]
    subject = {
        "config": options.model,
        "model": type(step.model).__name__,
        "batch": options.batch,
        "size": f"{height}x{width}, padding included",
        **named,
        "memory_format": "as the config says",
    }
    training = Training(step.model, step.loss, sparse_root, selection, amp_dtype(options.dtype))
    return training, subject


def strategy_of(text: str) -> Strategy:
    """The strategy of NAME or NAME,OPTION=VALUE,..."""
    name, options = named_options(text)
    return get_strategy(name, **options)


def measure(training: Training, options: argparse.Namespace, found: Measurements) -> None:
    """Add everything that --measure names to ``found``."""
    strategies = {text: strategy_of(text) for text in options.strategies}
    wanted = options.measure
    if "layers" in wanted:
        time_layers(training, options, strategies, found, (*GEMMS, PRUNING))
    if "op" in wanted:
        time_layers(training, options, strategies, found, (OP,))
    if {"steps", "compiled", "profile"} & set(wanted):
        compiled = "compiled" in wanted
        repeats = max(3, options.repeats // 3)
        print(
            f"training steps: {repeats} rounds of {1 + len(strategies)} models, "
            f"{'eager and compiled' if compiled else 'eager'} …",
            flush=True,
        )
        made = benchmark.contestants(
            training, strategies, compiled=compiled, forced=options.force_backends
        )
        found.steps = benchmark.time_steps(made, training, repeats)
        if "profile" in wanted:
            spent = {name: break_down(c, options.device) for name, c in made.ready.items()}
            found.breakdown.update(spent)
    if "memory" in wanted:
        found.memory.update(measure_memory(training, strategies))


def time_layers(
    training: Training,
    options: argparse.Namespace,
    strategies: dict[str, Strategy],
    found: Measurements,
    parts: Collection[str],
) -> None:
    """The times of each distinct layer under the strategies that make it sparse."""
    shapes = benchmark.layer_shapes(
        training.model,
        lambda: training.loss(training.model),
        training.selection.get("layers", "conv"),
    )
    converted = {name: training.converted(strategy) for name, strategy in strategies.items()}
    for index, (shape, names) in enumerate(shapes.items(), 1):
        sparse = {name: s for name, s in strategies.items() if converted[name].intersection(names)}
        print(f"layer {index} of {len(shapes)}: {shape} …", file=sys.stderr, flush=True)
        times = benchmark.time_layer(
            shape,
            len(names),
            sparse,
            device=options.device,
            dtype=getattr(torch, options.dtype),
            memory_format=torch.channels_last,
            repeats=options.repeats,
            forced=options.force_backends,
            parts=parts,
        )
        found.layers.append(times)
