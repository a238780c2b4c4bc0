"""Four faults of mmdet 3.3 and its fork 3.5.1, mended in memory; the installed files stay.

- Predicting with SSD reads a loss that its head has not (mmdetection issues 11063 and 11780).
- RPN, SSD and RetinaNet make anchors in the type of the outputs: in bfloat16 (8 bits) a box at
  x = 1000 moves by up to 2 pixels, and mmcv's compiled NMS refuses it.
- The coordinates of regions of interest get the type of the features, which moves them too.
- VOC's average precision forks processes from one with threads (a TensorBoard writer, data
  loaders), which may never end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from mmdet.evaluation.functional import mean_ap
from mmdet.models.dense_heads import SSDHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its 16-bit tensors, which may be within lists and tuples, in float32."""

    @functools.wraps(method)
    def widened(self: Any, *args: Any, **kwargs: Any) -> Any:
        wide = {name: _wide(value) for name, value in kwargs.items()}
        return method(self, *_wide(args), **wide)

    return widened


def _wide(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_wide(part) for part in value]
    is_narrow = torch.is_tensor(value) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if is_narrow else value


SSDHead.loss_cls = None
BaseDenseHead.predict_by_feat = _in_float32(BaseDenseHead.predict_by_feat)
SingleRoIExtractor.forward = _in_float32(SingleRoIExtractor.forward)
mean_ap.Pool = ThreadPool
