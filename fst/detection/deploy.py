"""What of a detector can be exported: all up to the head's outputs."""

from __future__ import annotations

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
