"""Mends two faults of mmdet 3.3 and its fork in their classes; the installed files stay.

Each is mended only where it is found, and once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_MARK = "_fst_mended"


def apply() -> None:
    """Mends SSDHead and SingleRoIExtractor. Imports mmdet, so `fst.detection.ops` comes first."""
    from mmdet.models.dense_heads import SSDHead
    from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor

    _wrap_once(SSDHead, "__init__", _with_loss_cls)
    _wrap_once(SingleRoIExtractor, "forward", _in_float32)


def _wrap_once(owner: type, method: str, wrapper: Any) -> None:
    original = getattr(owner, method)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, method, wrapped)


def _with_loss_cls(init: Any) -> Any:
    """Gives SSDHead the attribute `loss_cls`, which predicting reads and its own loss does without.

    It must be an instance's: a class's would hide the module of a subclass that sets its own.
    (mmdetection issues 11063 and 11780.)
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not hasattr(self, "loss_cls"):
            self.loss_cls = None

    return __init__


def _in_float32(forward: Any) -> Any:
    """Extracts features of regions in float32 when they are of a 16-bit type.

    mmdet gives the coordinates the type of the features; in bfloat16 (8 bits) that moves a box at
    x = 1000 by up to 2 pixels. Features keep their type.
    """

    def extract(
        self: Any, feats: tuple[Tensor, ...], rois: Tensor, roi_scale_factor: float | None = None
    ) -> Tensor:
        dtype = feats[0].dtype
        if dtype.itemsize >= 4:
            return forward(self, feats, rois, roi_scale_factor)
        with torch.autocast(rois.device.type, enabled=False):
            wide = tuple(level.float() for level in feats)
            return forward(self, wide, rois.float(), roi_scale_factor).to(dtype)

    return extract
