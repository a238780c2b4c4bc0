"""The part of a detector that can be exported: all up to the head's outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor, nn


class HeadOutputs(nn.Module):
    """Backbone, neck and head of a detector, under their own names; no boxes are decoded.

    The head is the `bbox_head` of a one-stage detector, and the `rpn_head` of a two-stage one,
    whose second stage takes regions that are chosen from this one's outputs.

    Args:
        detector: of MMDetection, converted or not; its parts are shared.

    Raises:
        ValueError: ``detector`` has no such parts.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        heads = [name for name in ("bbox_head", "rpn_head") if hasattr(detector, name)]
        if not hasattr(detector, "backbone") or not heads:
            raise ValueError(
                f"{type(detector).__name__} cannot be exported: it has no backbone with a "
                "bbox_head or an rpn_head."
            )
        self.head_name = heads[0]
        self.backbone = detector.backbone
        if getattr(detector, "neck", None) is not None:
            self.neck = detector.neck
        self.add_module(self.head_name, getattr(detector, self.head_name))

    def forward(self, images: Tensor) -> tuple[list[Tensor], ...]:
        """(N, 3, H, W), normalised -> the head's scores and boxes, a tensor for each level."""
        features = self.backbone(images)
        if hasattr(self, "neck"):
            features = self.neck(features)
        return getattr(self, self.head_name)(features)

    def output_names(self, count: int) -> list[str]:
        """Names of the ``count`` output tensors; empty unless the head has anchors."""
        if not self._has_anchors:
            return []
        return [f"{what}_{level}" for what in ("scores", "boxes") for level in range(count // 2)]

    def metadata(self, classes: Sequence[str]) -> dict[str, str]:
        """Everything that decodes the outputs, each as JSON; empty unless the head has anchors.

        - classes: names in the order of the scores; none for the regions of a two-stage detector.
        - scores: "softmax" (after the classes comes the background) or "sigmoid".
        - anchors: for each level, (x1, y1, x2, y2) of the anchors at the upper left position, in
          pixels of the input. A level's channels are (anchors, scores) and (anchors, 4).
        - strides: for each level, pixels (x, y) from one position to the next.
        - box_means, box_stds: boxes are (dx, dy, dw, dh) · box_stds + box_means, relative to the
          anchor's centre and size.
        """
        if not self._has_anchors:
            return {}
        head = getattr(self, self.head_name)
        anchors, coder = head.prior_generator, head.bbox_coder
        values = {
            "classes": list(classes) if self.head_name == "bbox_head" else [],
            "scores": "sigmoid" if head.use_sigmoid_cls else "softmax",
            "anchors": [level.tolist() for level in anchors.base_anchors],
            "strides": [list(stride) for stride in anchors.strides],
            "box_means": list(coder.means),
            "box_stds": list(coder.stds),
        }
        return {name: json.dumps(value) for name, value in values.items()}

    @property
    def _has_anchors(self) -> bool:
        head = getattr(self, self.head_name)
        has_coder = hasattr(getattr(head, "bbox_coder", None), "stds")
        return has_coder and hasattr(getattr(head, "prior_generator", None), "base_anchors")
