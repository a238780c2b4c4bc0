"""What the options of a model and its batches mean."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from fst.command_lines.analyze import SPLITS
from fst.lab.analysis.subject import (
    SIZE,
    Subject,
    from_config,
    from_config_on_random_images,
    from_name,
)

CLASSES = 1000  # of a model that is named


def subject_of(options: argparse.Namespace) -> Subject:
    """The model and its batches.

    Raises:
        ValueError: neither or both of config and --model, or anything wrong with them.
    """
    if (options.config is None) == (options.model is None):
        raise ValueError("give either a config or --model, not both.")
    if options.threads:
        torch.set_num_threads(options.threads)
    common: dict[str, Any] = {
        name: getattr(options, name) for name in ("batches", "batch_size", "device", "seed")
    }
    on_random_images = options.random_images
    if options.config is not None and options.classes:
        raise ValueError("--classes needs --model: a config says it itself.")
    if options.config is not None and options.size and not on_random_images:
        raise ValueError("--size needs --model or --random-images: it is that of random images.")
    if on_random_images:
        return _on_random_images(options)
    if options.model is None:
        return from_config(
            options.config,
            options.cfg_options,
            checkpoint=options.checkpoint,
            split=options.split or SPLITS[0],
            **common,
        )
    for name in ("checkpoint", "cfg_options", "split"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} needs a config, not --model.")
    classes, size = options.classes or CLASSES, options.size or SIZE
    return from_name(options.model, classes=classes, size=size, **common)


def _on_random_images(options: argparse.Namespace) -> Subject:
    if options.config is None or options.checkpoint or options.split:
        raise ValueError("--random-images needs a config, and neither --checkpoint nor --split.")
    return from_config_on_random_images(
        options.config,
        options.cfg_options,
        batch_size=options.batch_size,
        size=options.size,
        device=options.device,
        seed=options.seed,
    )
