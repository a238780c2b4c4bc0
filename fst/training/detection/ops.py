"""mmcv's operators that SSD and Faster R-CNN need, by torchvision.

mmcv installed from its source package without a compiler has no `mmcv._ext`, and then neither
`mmcv.ops` nor mmdet can be imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import torchvision
from torch import Tensor

from fst.basics.extras import extra_named

EXTENSION = "mmcv._ext"
HOW_TO_COMPILE = (
    "To get it, compile mmcv where torch and a C++ compiler are installed (tens of minutes): "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps onedl-mmcv"
)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes that stay, best first; 16-bit boxes are compared in float32.

    Args:
        boxes: (n, 4): x1, y1, x2, y2.
        scores: (n,).
        iou_threshold: a box goes if its IoU with a better one is larger.
        offset: 0, or 1 where a box's width is x2 - x1 + 1.
    """
    boxes = boxes.float() + boxes.new_tensor([0, 0, offset, offset])
    return torchvision.ops.nms(boxes, scores.float(), iou_threshold)


def roi_align(
    input: Tensor,
    rois: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    pool_mode: str = "avg",
    aligned: bool = True,
) -> Tensor:
    """RoIAlign (He et al. 2017), averaging: (n, c, h, w) and (k, 5) -> (k, c, *output_size)."""
    if pool_mode != "avg":
        raise NotImplementedError(f"RoIAlign by torchvision takes no pool_mode={pool_mode!r}.")
    return torchvision.ops.roi_align(
        input, rois, output_size, spatial_scale, sampling_ratio, aligned
    )


class StandIn(types.ModuleType):
    """In the place of `mmcv._ext`: an attribute for every operator, so that `mmcv.ops` imports."""

    nms = staticmethod(nms)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {EXTENSION!r} has no attribute {name!r}")

        def unavailable(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(
                f"mmcv's operator {name!r} needs mmcv's compiled extension. {HOW_TO_COMPILE}"
            )

        return unavailable


def install() -> None:
    """Let `mmcv.ops` be imported, by a stand-in where mmcv has no compiled extension.

    Raises:
        ImportError: mmcv is not installed, or its extension does not load.
    """
    with extra_named():
        importlib.import_module("mmcv")
    try:
        importlib.import_module(EXTENSION)
    except ModuleNotFoundError:
        sys.modules[EXTENSION] = StandIn(EXTENSION)
        sys.modules[EXTENSION].__spec__ = ModuleSpec(EXTENSION, None)  # MMEngine looks for it
        importlib.import_module("mmcv.ops")
        vars(sys.modules["mmcv.ops.roi_align"])["roi_align"] = roi_align
