"""Measure as the options of `fst bench` ask: layers, training steps."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch

from fst import get_strategy
from fst.cli.options.lab import ROUNDS, STEP_SECONDS
from fst.lab.benchmark.layers import layer_shapes, time_layer
from fst.lab.benchmark.measurements import Measurements
from fst.lab.benchmark.steps import candidates, time_steps
from fst.lab.model import Training, from_config, from_name, is_config
from fst.rules.strategy import Strategy


def model_under_test(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """The model of --model on random data, and its rows of the report's header."""
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
    strategies = {text: get_strategy(text) for text in options.strategies}
    wanted = options.measure
    if "layers" in wanted:
        time_layers(training, options, strategies, found)
    if {"steps", "compiled"} & set(wanted):
        made = candidates(
            training,
            strategies,
            compiled="compiled" in wanted,
            forced=options.force_backends,
        )
        seconds = math.inf if options.repeats else STEP_SECONDS / len(made.ready)
        found.steps = time_steps(made, training, options.repeats or ROUNDS, seconds)


def time_layers(
    training: Training,
    options: argparse.Namespace,
    strategies: dict[str, Strategy],
    found: Measurements,
) -> None:
    """The times of each distinct layer under the strategies that make it sparse."""
    shapes = layer_shapes(
        training.model,
        lambda: training.loss(training.model),
        training.selection.get("layers", "conv"),
    )
    converted = {name: training.converted(strategy) for name, strategy in strategies.items()}
    for index, (shape, names) in enumerate(shapes.items(), 1):
        sparse = {name: s for name, s in strategies.items() if converted[name].intersection(names)}
        print(f"layer {index} of {len(shapes)}: {shape} …", file=sys.stderr, flush=True)
        times = time_layer(
            shape,
            len(names),
            sparse,
            device=options.device,
            dtype=getattr(torch, options.dtype),
            memory_format=torch.channels_last,
            repeats=options.repeats or ROUNDS,
        )
        found.layers.append(times)
