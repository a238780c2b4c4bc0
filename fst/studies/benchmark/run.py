"""What the options of `fst bench` ask for, measured: layers, training steps, memory."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fst.models.named import build_architecture
from fst.rules.strategy import GEMMS, Strategy
from fst.strategies.registry import get_strategy
from fst.studies import benchmark
from fst.studies.arguments import amp_dtype, named_options, source_and_name
from fst.studies.benchmark import roofline
from fst.studies.benchmark.breakdown import break_down
from fst.studies.benchmark.layers import OP, PRUNING
from fst.studies.benchmark.measurements import Measurements
from fst.studies.benchmark.memory import measure_memory
from fst.studies.benchmark.roofline import Rates
from fst.studies.benchmark.steps import Training


def from_name(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """A classifier of torchvision or timm on random images, and what the report says of it."""
    model = build_architecture(*source_and_name(options.model), num_classes=options.classes)
    height, width = options.size or (224, 224)
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    model = model.to(options.device, memory_format=memory_format)
    images = torch.randn(options.batch, 3, height, width, device=options.device)
    images = images.contiguous(memory_format=memory_format)
    labels = torch.randint(options.classes, (options.batch,), device=options.device)

    def loss(trained: nn.Module) -> Tensor:
        return F.cross_entropy(trained(images), labels)

    subject = {
        "model": options.model,
        "batch": options.batch,
        "size": f"{height}x{width}",
        "layers": options.layers,
        "memory_format": str(memory_format),
    }
    selection = {"layers": options.layers}
    training = Training(model, loss, selection=selection, amp_dtype=amp_dtype(options.dtype))
    return training, subject


def from_config(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """The model of a training config on random data, and what the report says of it."""
    from fst.engine.config import load_config, read_sparsity
    from fst.engine.model import sparse_root
    from fst.engine.sample import sample_step

    config = load_config(options.config)
    step = sample_step(config, options.batch, options.size, options.device)
    _, selection = read_sparsity(config)
    selection.pop("plan", None)  # the config's own strategy's, which is not what is compared
    named = {key: names for key, names in selection.items() if names is not None}
    height, width = step.batch_shape[2:]
    subject = {
        "config": options.config,
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
    """Add everything that the options do not skip to ``found``."""
    strategies = {text: strategy_of(text) for text in options.strategies}
    if not options.no_layers:
        time_layers(training, options, strategies, found)
    if options.no_steps or options.op:
        return
    wanted = options.device.type == "cuda" if options.compile is None else options.compile
    compiled = options.compile_mode if wanted else None
    steps = "eager and compiled" if compiled else "eager"
    repeats = max(3, options.repeats // 3)
    print(
        f"training steps: {repeats} rounds of {1 + len(strategies)} models, {steps} …", flush=True
    )
    made = benchmark.contestants(
        training, strategies, compile_mode=compiled, forced=options.force_backends
    )
    found.steps = benchmark.time_steps(made, training, repeats)
    if not options.no_profile:
        spent = {name: break_down(c, options.device) for name, c in made.ready.items()}
        found.breakdown.update(spent)
    if not options.no_memory:
        del made
        found.memory.update(measure_memory(training, strategies))


def time_layers(
    training: Training,
    options: argparse.Namespace,
    strategies: dict[str, Strategy],
    found: Measurements,
) -> None:
    """The times of each distinct layer and their bounds, under the strategies that make it sparse;
    with --op those of the op.
    """
    dtype = getattr(torch, options.dtype)
    if not options.op:
        found.rates = _rates(options, dtype)
    tried = {}
    if options.backends or options.all_backends or options.force_backends:
        named = options.force_backends
        tried = benchmark.runnable_backends(named, unverified=options.all_backends)
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
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
            dtype=dtype,
            memory_format=memory_format,
            repeats=options.repeats,
            tried=tried,
            forced=options.force_backends,
            parts=[OP] if options.op else (*GEMMS, PRUNING),
        )
        found.layers.append(times)
        if found.rates is not None:
            found.bounds.append(roofline.layer_bounds(times, sparse, dtype, found.rates))


def _rates(options: argparse.Namespace, dtype: torch.dtype) -> Rates:
    """The machine's rates, measured as far as they are not given."""
    measured = roofline.measure_rates(options.device, dtype)
    return Rates(
        options.tflops * 1e12 if options.tflops else measured.dense,
        options.bandwidth * 1e12 if options.bandwidth else measured.bandwidth,
        options.sparse_tflops * 1e12 if options.sparse_tflops else None,
    )


def rate_words(rates: Rates, options: argparse.Namespace) -> dict[str, str]:
    """What the report says of the machine's rates, and where they are from."""

    def rate(value: float, unit: str, given: float | None, measured_with: str) -> str:
        text = f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"
        return f"{text}, {'given' if given else f'measured with {measured_with}'}"

    matmul = f"a large matrix product in {options.dtype}"
    sparse = "none given: the dense rate"
    if rates.sparse is not None:
        sparse = rate(rates.sparse, "FLOP/s", options.sparse_tflops, "")
    return {
        "dense rate": rate(rates.dense, "FLOP/s", options.tflops, matmul),
        "sparse rate": sparse,
        "bandwidth": rate(rates.bandwidth, "B/s", options.bandwidth, "a large copy"),
    }
