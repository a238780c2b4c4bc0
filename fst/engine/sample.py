"""One training step of a config's model on random data: no data set, no pretrained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from torch import Tensor, nn

from fst.engine.classifier import Classifier
from fst.engine.model import build_model, sparse_root


class SampleStep(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        model: as the config builds it, dense, in training mode.
        root: the part of it that sparsity is about; layers go by names within it.
        loss: the training loss of ``model``, or of a copy of it, on the batch.
        batch_shape: (N, C, H, W) as the model sees it, padding included.
    """

    model: nn.Module
    root: nn.Module
    loss: Callable[[nn.Module], Tensor]
    batch_shape: tuple[int, ...]


def sample_step(
    config: Config,
    batch_size: int,
    size: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
) -> SampleStep:
    """Build a config's model, randomly initialised, and a random batch for it.

    Args:
        config: of a classifier of FST, or of a detector of MMDetection.
        batch_size: images.
        size: height and width of the images; if None, those of the Resize of a detector's training
            pipeline.
        device: where model and batch are.

    Raises:
        ValueError: no size given or found, or a model that is neither classifier nor detector.
    """
    scope = config.get("default_scope") or "mmengine"
    if scope == "mmdet":
        from fst.detection import sample
    model = build_model(config).to(device).train()
    if isinstance(model, Classifier):
        if size is None:
            raise ValueError("size=None: a classifier's config names no size; give one.")
        generator = torch.Generator().manual_seed(0)
        mean = getattr(model.data_preprocessor, "mean", None)
        shape = (batch_size, 3 if mean is None else mean.numel(), *size)
        images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.randint(model.num_classes, (batch_size,), generator=generator)
        if getattr(model.data_preprocessor, "mixup", None):  # the loss takes probabilities
            labels = nn.functional.one_hot(labels, model.num_classes).float()
        batch: dict[str, Any] = {"inputs": images, "labels": labels}
    elif scope == "mmdet":
        if size is None:
            found = (sample.input_size(p) for p in _pipelines(config.get("train_dataloader")))
            size = next((s for s in found if s is not None), None)
        if size is None:
            raise ValueError(
                "size=None: the training pipeline has no Resize with a scale; give one."
            )
        batch = sample.random_batch(model, batch_size, *size)
    else:
        raise ValueError(
            f"model {type(model).__name__}: random data is known for FST's Classifier and for "
            "detectors (default_scope='mmdet')."
        )
    data = model.data_preprocessor(batch, training=False)

    def loss(trained: nn.Module) -> Tensor:
        return trained.parse_losses(trained(**data, mode="loss"))[0]

    return SampleStep(model, sparse_root(model), loss, tuple(data["inputs"].shape))


def _pipelines(node: Any) -> Iterator[list[dict[str, Any]]]:
    """The pipelines of all data sets below a dataloader's config."""
    if isinstance(node, Mapping):
        if isinstance(node.get("pipeline"), list):
            yield node["pipeline"]
        for value in node.values():
            yield from _pipelines(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _pipelines(value)
