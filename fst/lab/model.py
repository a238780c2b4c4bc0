"""A model under test: how it is made, and the loss of its training step on a random batch."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fst.api.attach import attach
from fst.api.convert import convert
from fst.backends.timing import Function
from fst.layers.modules import sparse_layers
from fst.rules.strategy import Strategy
from fst.training.architecture import named_model

CLASSES = 1000  # of a model that is named
SIZE = (224, 224)  # of its images
# Random weights on one random batch may diverge within two steps, as SSD300's do, and zeros go with
# them. A step at this rate does all of its work, rounding leaves the weights as they are, and the
# next one takes as long. At a rate of 0 a step would ask whether its gradients are 0, and so wait
# for a GPU.
LEARNING_RATE = 1e-30


def amp_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for float32."""
    return None if name == "float32" else getattr(torch, name)


@dataclass(frozen=True)
class Training:
    """A model under test and its loss; each candidate of a comparison trains a copy.

    Attributes:
        model: the dense model.
        loss: its training loss on a fixed batch, for the model or a copy of it.
        root: the part of a model that is converted.
        selection: ``include``, ``exclude`` and other choices of `fst.convert`.
        amp_dtype: autocast's type, or None without autocast.
        batch_shape: (N, C, H, W) as the model sees it, padding included.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    root: Callable[[nn.Module], nn.Module] = lambda model: model
    selection: Mapping[str, Any] = field(default_factory=dict)
    amp_dtype: torch.dtype | None = None
    batch_shape: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def converted(self, strategy: Strategy) -> set[str]:
        """Names of the layers that are sparse under a strategy."""
        model = copy.deepcopy(self.model)
        convert(self.root(model), strategy, **self.selection)
        return set(sparse_layers(model))

    def candidate(
        self, strategy: Strategy | None, compiled: bool = False
    ) -> tuple[nn.Module, Function]:
        """A copy of the model, converted unless ``strategy`` is None, and its training step.

        The step changes no weight.

        ``compiled``: by torch.compile, which must make one graph of the model.
        """
        trained = copy.deepcopy(self.model).train()
        parameters = (p for p in trained.parameters() if p.requires_grad)
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
        attached = None
        if strategy is not None:
            convert(self.root(trained), strategy, **self.selection)
            root = self.root(trained)
            attached = attach(root, optimizer, total_steps=10**6, steps_per_epoch=10**3)
        if compiled:
            trained.compile(fullgraph=True)

        def step() -> None:
            enabled = self.amp_dtype is not None
            with torch.autocast(self.device.type, self.amp_dtype, enabled=enabled):
                loss = self.loss(trained)
            if attached is not None:
                attached.report_loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return trained, step


def from_name(
    name: str,
    batch_size: int,
    size: tuple[int, int] | None = None,
    *,
    layers: str = "conv",
    dtype: str = "float32",
    device: torch.device | str = "cpu",
) -> Training:
    """A classifier "[torchvision:|timm:|fst:]NAME" with random weights, on random images.

    Raises:
        ValueError: unknown source or name.
    """
    model = named_model(name, num_classes=CLASSES)
    model = model.to(device, memory_format=torch.channels_last)
    images = torch.randn(batch_size, 3, *(size or SIZE), device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch_size,), device=device)
    return Training(
        model,
        lambda trained: F.cross_entropy(trained(images), labels),
        selection={"layers": layers},
        amp_dtype=amp_dtype(dtype),
        batch_shape=tuple(images.shape),
    )


def from_config(
    path: str,
    batch_size: int,
    size: tuple[int, int] | None = None,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
) -> Training:
    """The model of a training config, dense, with random weights, on random data.

    Args:
        path: as for `fst train`; of a classifier, or of a detector of MMDetection.
        batch_size: images.
        size: their height and width; None: those of the Resize of a detector's training pipeline.
        dtype: autocast's, or "float32" without autocast.
        device: where model and batch are.

    Raises:
        ValueError: the config does not fit; no size is given or found; or the model is neither a
            classifier nor a detector.
        FileNotFoundError: there is no such config.
    """
    from fst.training.engine.classifier import Classifier
    from fst.training.engine.config import load_config, read_sparsity
    from fst.training.engine.data_root import datasets_of
    from fst.training.engine.model import build_model, initialise, sparse_root

    config = load_config(path)
    is_detector = config.get("default_scope") == "mmdet"
    if is_detector:
        from fst.training.detection import sample
    model = build_model(config).to(device).train()
    if not is_detector and not isinstance(model, Classifier):
        raise ValueError(
            f"model {type(model).__name__}: random data is known for FST's Classifier and for "
            "detectors (default_scope='mmdet')."
        )
    if is_detector and size is None:
        trained = datasets_of(config)["train_dataloader"]
        found = (sample.input_size(dataset.get("pipeline") or []) for dataset in trained)
        size = next(filter(None, found), None)
    if size is None:
        what = "the training pipeline has no Resize with a scale"
        what = what if is_detector else "a classifier's config names no size"
        raise ValueError(f"size=None: {what}; give one.")
    initialise(model, fetches=False)
    batch = (sample.random_batch if is_detector else _random_batch)(model, batch_size, *size)
    data = model.data_preprocessor(batch, training=False)
    _, selection = read_sparsity(config)

    def loss(trained: nn.Module) -> Tensor:
        return trained.parse_losses(trained(**data, mode="loss"))[0]

    shape = tuple(data["inputs"].shape)
    return Training(model, loss, sparse_root, selection, amp_dtype(dtype), shape)


def model_under_test(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """The model of `fst bench --model` on random data, and its rows of the report's header."""
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


def _random_batch(model: Any, batch_size: int, height: int, width: int) -> dict[str, Any]:
    """Return a classifier's batch as a dataloader gives it: the same random one for each size."""
    generator = torch.Generator().manual_seed(0)
    mean = getattr(model.data_preprocessor, "mean", None)
    shape = (batch_size, 3 if mean is None else mean.numel(), height, width)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(model.num_classes, (batch_size,), generator=generator)
    if getattr(model.data_preprocessor, "mixup", None):  # the loss takes probabilities
        labels = F.one_hot(labels, model.num_classes).float()
    return {"inputs": images, "labels": labels}


def is_config(model: str) -> bool:
    """True if ``model`` is a training config, by path or of the package, and no name."""
    return model.endswith((".py", ".yaml", ".yml", ".json")) or model.startswith("fst::")
