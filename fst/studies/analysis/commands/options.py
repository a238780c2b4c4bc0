"""Options that subcommands share, and what they make of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fst.basics.arguments import positive, positive_number, usable_device
from fst.engine.arguments import add_cfg_options
from fst.strategies.registry import list_strategies
from fst.studies.analysis.probe import PROBE
from fst.studies.analysis.subject import (
    SIZE,
    SPLITS,
    Subject,
    from_config,
    from_config_on_random_images,
    from_name,
)
from fst.studies.arguments import DTYPES

CLASSES = 1000  # of a model that is named
APPROXIMATIONS_HELP = (
    f"NAME or NAME,option=value,...: one of {', '.join(list_strategies())}; or {PROBE!r}, a "
    "pruning of grad_output alone, with the options n=2, m=4, "
    "rule=magnitude|random|magnitude_rescaled, "
    "rescale=sample_channel|channel|group, axis=channel|position (along which groups run) and "
    "gemm=grad_input|grad_weight|both (which GEMM sees the pruned one)"
)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """--out: where everything is written."""
    default = Path("work_dirs/analysis") / name
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder to write (default: {default})"
    )


def add_subject(
    parser: argparse.ArgumentParser,
    *,
    batches: int,
    batch_size: int,
    needs_data: bool,
    several: bool = False,
) -> None:
    """A model with batches: a config (or ``several``), or --model on random images."""
    parser.add_argument(
        "configs" if several else "config",
        nargs="*" if several else "?",
        metavar="config",
        help="training config, of a classifier or a detector (or use --model)",
    )
    parser.add_argument("--checkpoint", help="weights to load (default: random weights)")
    parser.add_argument("--split", choices=SPLITS, help="whose images (default: train)")
    add_cfg_options(parser)
    parser.add_argument(
        "--model",
        metavar="[SOURCE:]NAME",
        help="instead of a config: a classifier of torchvision (the default), timm or fst, with "
        "random weights on random images, such as resnet18 or timm:resnet50"
        + ("; its numbers say nothing about real images" if needs_data else ""),
    )
    parser.add_argument("--classes", type=positive, help="of --model (default: 1000)")
    parser.add_argument(
        "--size",
        type=positive,
        help="height and width of random images (default: 224; a detector's own)",
    )
    if not needs_data:
        parser.add_argument(
            "--random-images",
            action="store_true",
            help="use the config's model with random weights on random images: needs no data",
        )
    parser.add_argument(
        "--batches", type=positive, default=batches, help=f"how many (default: {batches})"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=batch_size,
        help=f"images per batch (default: {batch_size})",
    )
    parser.add_argument(
        "--device",
        type=usable_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device (default: cuda where there is one)",
    )
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")


def add_precision(parser: argparse.ArgumentParser, what: str) -> None:
    """--dtype and --loss-scale."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help=f"autocast of {what} (default: float32)"
    )
    parser.add_argument(
        "--loss-scale",
        type=positive_number,
        default=1.0,
        help="the loss is multiplied by it, the gradients are divided by it (default: 1)",
    )


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
    on_random_images = getattr(options, "random_images", False)
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
