"""Compares the sizes of a head's anchors with those of the boxes in the training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mmdet.models.task_modules.prior_generators import SSDAnchorGenerator
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import Tensor, nn

LEAST_OVERLAP = 0.5  # IoU from which heads take an anchor for an object's
LEAST_SHARE = 0.9
MOST_IMAGES = 2000


@HOOKS.register_module()
class AnchorFitHook(Hook):
    """Say, before a training, how many of its boxes the anchors fit, and which sizes would."""

    def before_train(self, runner: Any) -> None:
        """Log one line for the head that has anchors; a warning where many boxes have none."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        generator = anchors_of(model)
        boxes = box_sizes(runner.train_dataloader.dataset)
        if generator is None or not len(boxes):
            return
        anchors = torch.cat([level[:, 2:] - level[:, :2] for level in generator.base_anchors])
        share = fitting(boxes, anchors)
        text = (
            f"Anchors: {share:.0%} of the training boxes, as Resize makes them, overlap the shape "
            f"of an anchor by half"
        )
        if share >= LEAST_SHARE:
            runner.logger.info(text)
            return
        low, high = (float(x) for x in boxes.prod(1).sqrt().quantile(torch.tensor([0.05, 0.95])))
        sides = anchors.prod(1).sqrt()
        text += (
            f". The sides of nine in ten boxes are {low:.0f} to {high:.0f} pixels, those of the "
            f"anchors {float(sides.min()):.0f} to {float(sides.max()):.0f}."
        )
        if isinstance(generator, SSDAnchorGenerator):
            least, most = fitted_sizes(boxes, generator.num_levels)
            name = "model.bbox_head.anchor_generator"
            text += f" Fitted to the boxes: {name}.min_sizes={least} {name}.max_sizes={most}"
        runner.logger.warning(text)


def anchors_of(model: nn.Module) -> Any:
    """The generator of anchors of a detector's first head that has one; None if none has."""
    generators = (getattr(module, "prior_generator", None) for module in model.modules())
    return next((found for found in generators if hasattr(found, "base_anchors")), None)


def box_sizes(dataset: Any) -> Tensor:
    """Widths and heights (N, 2) of a data set's boxes, in pixels after the pipeline's Resize."""
    sizes = [
        size
        for index in range(min(len(dataset), MOST_IMAGES))
        for size in _sizes(dataset.get_data_info(index), _resize(dataset))
    ]
    return torch.tensor(sizes, dtype=torch.float32).reshape(-1, 2)


def fitting(boxes: Tensor, anchors: Tensor) -> float:
    """The share of boxes (N, 2) whose IoU with one of the anchors (M, 2), centred, is enough."""
    common = torch.minimum(boxes[:, None], anchors[None]).prod(2)
    union = boxes.prod(1)[:, None] + anchors.prod(1)[None] - common
    return float(((common / union).amax(1) >= LEAST_OVERLAP).float().mean())


def fitted_sizes(boxes: Tensor, levels: int) -> tuple[list[int], list[int]]:
    """SSD's ``min_sizes`` and ``max_sizes``: as many boxes fall into each level."""
    shares = torch.linspace(0.02, 0.98, levels + 1)
    bounds = boxes.prod(1).sqrt().quantile(shares).round().int().tolist()
    bounds = [max(side, index + 1) for index, side in enumerate(bounds)]
    return bounds[:-1], bounds[1:]


def _resize(dataset: Any) -> Any:
    inner = dataset
    while not hasattr(inner, "pipeline"):
        inner = inner.datasets[0] if hasattr(inner, "datasets") else inner.dataset
    return next((t for t in inner.pipeline.transforms if getattr(t, "scale", None)), None)


def _sizes(info: dict[str, Any], resize: Any) -> Iterator[tuple[float, float]]:
    across = down = 1.0
    if resize is not None:
        (width, height), own = resize.scale, (info["width"], info["height"])
        across, down = width / own[0], height / own[1]
        if resize.keep_ratio:
            long, short = max(resize.scale) / max(own), min(resize.scale) / min(own)
            across = down = min(long, short)
    for instance in info["instances"]:
        x1, y1, x2, y2 = instance["bbox"]
        yield (x2 - x1) * across, (y2 - y1) * down
