"""What the options of `fst bench` ask for, measured: layers, training steps, memory."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from fst.lab import benchmark
from fst.lab.arguments import strategy_of
from fst.lab.benchmark.breakdown import break_down
from fst.lab.benchmark.measurements import Measurements
from fst.lab.benchmark.memory import measure_memory
from fst.lab.subject import Training, from_config, from_name, is_config
from fst.rules.strategy import Strategy


def subject(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """What --model names on random data, and what the report says of it."""
    given = {"size": options.size, "dtype": options.dtype, "device": options.device}
    if not is_config(options.model):
        training = from_name(options.model, options.batch, layers=options.layers or "conv", **given)
        memory_format = str(torch.channels_last)
    elif options.layers is not None:
        raise ValueError(f"--layers {options.layers}: the config says which layers itself.")
    else:
        training = from_config(options.model, options.batch, **given)
        memory_format = "as the config says"
    return training, {
        "model": options.model,
        "batch": options.batch,
        "size": "x".join(map(str, training.batch_shape[2:])),
        **{key: chosen for key, chosen in training.selection.items() if chosen is not None},
        "memory_format": memory_format,
    }


def measure(training: Training, options: argparse.Namespace, found: Measurements) -> None:
    """Add everything that --measure names to ``found``."""
    strategies = {text: strategy_of(text) for text in options.strategies}
    wanted = options.measure
    if "layers" in wanted:
        time_layers(training, options, strategies, found)
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
        )
        found.layers.append(times)
