"""The model under test, its batches and loss, and its options on the scripts' command lines."""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mmengine.model import BaseModel
from torch import Tensor, nn

import fst
from fst.basics.arguments import positive
from fst.cli.options.parsing import add_cfg_options
from fst.files.checkpoint import load_checkpoint_safely
from fst.rules.strategy import Strategy
from fst.training.architecture import source_and_name
from fst.training.engine.checks import check_config
from fst.training.engine.classifier import Classifier
from fst.training.engine.config import load_config, read_sparsity
from fst.training.engine.data.loader import build_dataloader
from fst.training.engine.model import build_model, initialise, sparse_root
from fst.training.engine.trained import load_weights

SPLITS = ("train", "val", "test")
CLASSES = 1000  # of a model that is named
SIZE = 224  # of random images
Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]  # the scalar that a training step derives


def one_step(strategy: Strategy) -> Strategy:
    """``strategy`` without what works across steps: its schedule, and the decay of weights.

    Masks are then those that its rules give for the weights as they are.
    """
    return replace(strategy, decay=0.0, schedule=None)


@contextmanager
def same_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators from ``seed`` for the block; restore them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@dataclass
class ModelUnderTest:
    """A model in training mode, batches on its device, and the sparsity of its config.

    Attributes:
        title: model and data in words.
        model: dense, whatever the config's sparsity is.
        batches: preprocessed, ready for the model.
        loss: the scalar that a training step derives, of a model and one of ``batches``.
        strategy: the config's, or None.
        selectors: ``include``, ``exclude`` and other choices of `fst.convert`.
        masks: sparsity state of the checkpoint, if it has one.
    """

    title: str
    model: BaseModel
    batches: list[Batch]
    loss: Loss
    strategy: Strategy | None = None
    selectors: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] | None = None

    @property
    def device(self) -> torch.device:
        """Device of model and batches."""
        return next(self.model.parameters()).device

    def copied(self, strategy: Strategy | None = None) -> BaseModel:
        """A copy of the model, converted if a strategy is given.

        It has the checkpoint's masks if the strategy is the config's, and its gradients are those
        of pruning alone (see `one_step`).
        """
        model = copy.deepcopy(self.model)
        if strategy is not None:
            root = sparse_root(model)
            fst.convert(root, strategy, **self.selectors)
            if self.masks is not None and strategy == self.strategy:
                fst.load_sparsity_state(root, self.masks)
            for layer in fst.sparse_layers(root).values():
                layer.strategy = one_step(layer.strategy)
        return model


def loss_of(model: BaseModel, batch: Mapping[str, Any]) -> Tensor:
    """The scalar that a training step of any mmengine model derives."""
    return model.parse_losses(model(**batch, mode="loss"))[0]


def images_of(batch: Mapping[str, Any]) -> Tensor:
    """The preprocessed images (N, C, H, W) of a batch.

    Raises:
        TypeError: the model's preprocessor does not make one tensor of them.
    """
    images = batch["inputs"]
    if not isinstance(images, Tensor):
        raise TypeError(f"the preprocessor gives inputs of type {type(images).__name__}.")
    return images


def from_config(
    path: str,
    options: Mapping[str, Any] | None = None,
    *,
    checkpoint: str | None = None,
    split: str = "train",
    batches: int = 1,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ModelUnderTest:
    """The model and the first batches of a training config.

    Args:
        path, options: as for `fst train`.
        checkpoint: weights (and masks) to load; else the model is as initialised from ``seed``.
        split: whose dataloader; its augmentation is that of the config.
        batches, batch_size: how much to read (batch size None: the config's).

    Raises:
        ValueError, FileNotFoundError: the config, the data or the checkpoint does not fit.
    """
    config = load_config(path, options, checkpoint)
    key = f"{split}_dataloader"
    if config.get(key) is None:
        raise ValueError(f"config {path!r} has no {key}.")
    check_config(config, (key,))
    torch.manual_seed(seed)
    model = build_model(config)
    loaded = load_checkpoint_safely(checkpoint) if checkpoint else {}
    strategy, selectors = read_sparsity(config)
    if checkpoint:
        load_weights(model, loaded, checkpoint, strategy)
    else:
        initialise(model)
    model = model.to(device).train()
    loader = build_dataloader(_loader_config(config[key], batch_size), seed=seed)
    # a detector's preprocessor prepares annotations in training alone
    as_trained = split == "train" or not isinstance(model, Classifier)
    read = [model.data_preprocessor(raw, as_trained) for raw in itertools.islice(loader, batches)]
    if len(read) < batches:
        raise ValueError(f"batches={batches}: the {split} data give {len(read)} only.")
    weights = f"weights of {checkpoint}" if checkpoint else "random weights"
    return ModelUnderTest(
        f"{config.filename or path}, {weights}",
        model,
        read,
        loss_of,
        strategy,
        selectors,
        loaded.get("sparsity"),
    )


def _loader_config(config: Any, batch_size: int | None) -> dict[str, Any]:
    """In this process: a few batches do not repay the start of workers."""
    made = copy.deepcopy(dict(config))
    made["num_workers"] = 0
    for name in ("persistent_workers", "prefetch_factor", "pin_memory"):
        made.pop(name, None)
    if batch_size is not None:
        made["batch_size"] = batch_size
    return made


def from_name(
    name: str,
    *,
    classes: int = 1000,
    size: int = SIZE,
    batches: int = 1,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ModelUnderTest:
    """A classifier "[torchvision:|timm:|fst:]NAME" with random weights, on random images.

    Raises:
        ValueError: unknown source or name.
    """
    source, rest = source_and_name(name)
    torch.manual_seed(seed)
    architecture = {"source": source, "name": rest, "num_classes": classes}
    model = Classifier(architecture).to(device).train()
    read = [
        {
            "inputs": torch.randn(batch_size, 3, size, size).to(device),
            "labels": torch.randint(classes, (batch_size,)).to(device),
        }
        for _ in range(batches)
    ]
    return ModelUnderTest(f"{source}:{rest}, random weights, random images", model, read, loss_of)


def add_model_options(parser: argparse.ArgumentParser, *, batches: int, batch_size: int) -> None:
    """A model with batches: a config, or --model on random images."""
    parser.add_argument(
        "config",
        nargs="?",
        help="training config, of a classifier or a detector (or use --model)",
    )
    parser.add_argument("--checkpoint", help="weights to load (default: random weights)")
    parser.add_argument("--split", choices=SPLITS, help="whose images (default: train)")
    add_cfg_options(parser)
    parser.add_argument(
        "--model",
        metavar="[SOURCE:]NAME",
        help="instead of a config: a classifier of torchvision (the default), timm or fst, with "
        "random weights on random images, such as resnet18 or timm:resnet50",
    )
    parser.add_argument("--classes", type=positive, help="of --model (default: 1000)")
    parser.add_argument(
        "--size", type=positive, help="height and width of --model's images (default: 224)"
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
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default: cuda where there is one)",
    )
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")


def tested_model(options: argparse.Namespace) -> ModelUnderTest:
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
    for name in ("classes", "size"):
        if options.config is not None and getattr(options, name):
            raise ValueError(f"--{name} needs --model: a config says it itself.")
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
