"""Random images with random boxes, for counting and timing training steps without data."""

from __future__ import annotations

from typing import Any

from mmdet.testing import demo_mm_inputs
from torch import nn


def random_batch(model: nn.Module, batch_size: int, height: int, width: int) -> dict[str, Any]:
    """Make a batch as mmdet's dataloaders do, always the same random one for a size.

    Args:
        model: a detector, whose heads know the number of classes.
        batch_size: images.
        height, width: of each image, in pixels.

    Returns:
        inputs: (3, height, width) uint8 for each image; data_samples: four boxes and labels each.
    """
    classes = max(getattr(module, "num_classes", 1) for module in model.modules())
    batch = demo_mm_inputs(
        batch_size, (3, height, width), num_items=[4] * batch_size, num_classes=classes + 1
    )
    for sample in batch["data_samples"]:
        sample.gt_instances.labels -= 1  # drawn from 1 .. classes
    return batch


def input_size(pipeline: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Height and width that the resizing of a training pipeline allows a landscape image."""
    for step in pipeline:
        if step.get("type") == "Resize" and step.get("scale") is not None:
            width, height = step["scale"]
            return height, width
    return None
