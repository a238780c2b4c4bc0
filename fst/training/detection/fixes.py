"""Four faults of mmdet 3.3 and its fork, mended in memory; the installed files stay.

Each is mended only where it is found, and once.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import mmengine.logging
import torch
from torch import Tensor

_MARK = "_fst_mended"


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what mmdet says, while it is imported, of packages that nothing here uses.

    MMEngine's `print_log` prints whatever has no logger, of any level.
    """
    said = mmengine.logging.print_log

    def print_log(message: Any, logger: Any = None, level: int = logging.INFO) -> None:
        if logger is not None or level > logging.DEBUG:
            said(message, logger, level)

    vars(mmengine.logging)["print_log"] = print_log
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "faster_coco_eval is not installed")
            yield
    finally:
        vars(mmengine.logging)["print_log"] = said


def apply() -> None:
    """Mend SSDHead, BaseDenseHead, SingleRoIExtractor, and VOC's average precision.

    It imports mmdet, so `fst.training.detection.ops` comes first.
    """
    from mmdet.evaluation.functional import mean_ap
    from mmdet.models.dense_heads import SSDHead
    from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
    from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor

    _wrap_once(SSDHead, "__init__", _with_loss_cls)
    _wrap_once(BaseDenseHead, "predict_by_feat", _boxes_in_float32)
    _wrap_once(SingleRoIExtractor, "forward", _extract_in_float32)
    # Processes forked from one with threads (a TensorBoard writer, data loaders) may never end.
    mean_ap.Pool = ThreadPool


def _wrap_once(owner: type, method: str, wrapper: Any) -> None:
    original = getattr(owner, method)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, method, wrapped)


def _with_loss_cls(init: Any) -> Any:
    """Give SSDHead the attribute ``loss_cls``, which predicting reads, its own loss not.

    It must be an instance's: a class's would hide the module of a subclass that sets its own.
    (mmdetection issues 11063 and 11780.)
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not hasattr(self, "loss_cls"):
            self.loss_cls = None

    return __init__


def _boxes_in_float32(predict: Any) -> Any:
    """Make the boxes of RPN, SSD and RetinaNet in float32 when their outputs are of a 16-bit type.

    mmdet gives the anchors the type of the outputs; in bfloat16 (8 bits) that moves a box at
    x = 1000 by up to 2 pixels, and mmcv's compiled NMS refuses it.
    """

    def predict_by_feat(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return predict(self, *_widened(args), **kwargs)

    return predict_by_feat


def _extract_in_float32(forward: Any) -> Any:
    """Extract features of regions in float32 when they are of a 16-bit type, which they keep.

    mmdet gives the coordinates the type of the features.
    """

    def extract(
        self: Any, feats: tuple[Tensor, ...], rois: Tensor, roi_scale_factor: float | None = None
    ) -> Tensor:
        with torch.autocast(rois.device.type, enabled=False):
            pooled = forward(self, _widened(feats), rois.float(), roi_scale_factor)
        return pooled.to(feats[0].dtype)

    return extract


def _widened(value: Any) -> Any:
    """Its 16-bit tensors, which may be within lists and tuples, in float32."""
    if isinstance(value, (list, tuple)):
        return [_widened(part) for part in value]
    is_narrow = torch.is_tensor(value) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if is_narrow else value
