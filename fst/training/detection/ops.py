"""mmcv's operators that SSD and Faster R-CNN need, made of torchvision's.

mmcv installed from its source package without a compiler has no `mmcv._ext`, and then neither
`mmcv.ops` nor mmdet can be imported. `install` puts a module in its place: NMS and RoIAlign
compute what mmcv's do (`mmcv/ops/csrc/pytorch`), on CPU and GPU; every other operator raises
`UnavailableOpError` when it is called. A compiled extension that loads is left alone.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import torchvision  # noqa: F401 (registers torch.ops.torchvision)
from torch import Tensor

from fst.basics.values import one_of

EXTENSION = "mmcv._ext"
HOW_TO_COMPILE = (
    "where torch and a C++ compiler are installed (tens of minutes): pip install "
    "--no-build-isolation --no-cache-dir --force-reinstall --no-deps onedl-mmcv"
)


class UnavailableOpError(NotImplementedError):
    """An operator of mmcv that needs the compiled extension was called without it."""


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes that stay, best first.

    A box goes if its IoU with a better one exceeds ``iou_threshold``. Among equal scores the first
    is the better.

    Args:
        boxes: (n, 4): x1, y1, x2, y2; 16-bit boxes are compared in float32.
        scores: (n,).
        iou_threshold: rounded to float32, as in mmcv.
        offset: 0, or 1 where a box's width is x2 - x1 + 1.
    """
    one_of("offset", int(offset), (0, 1))
    dtype = _compute_dtype(torch.promote_types(boxes.dtype, scores.dtype))
    boxes, scores = boxes.detach().to(dtype), scores.detach().to(dtype)
    if offset:
        boxes = boxes + boxes.new_tensor([0, 0, 1, 1])
    return torch.ops.torchvision.nms(boxes, scores, float(np.float32(iou_threshold)))


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """RoIAlign (He et al. 2017), averaging; 16-bit features are pooled in float32.

    ``output`` is written in place; arguments are those of mmcv's operator. ``argmax_y`` and
    ``argmax_x`` are of pool_mode 0 alone, which is refused: 1 averages.
    """
    _check_average(pool_mode)
    if aligned and rois.device.type == "cpu" and bool((rois[:, 3:] < rois[:, 1:3]).any()):
        raise ValueError("rois: RoIAlign with aligned=True needs x1 <= x2 and y1 <= y2.")
    dtype = _compute_dtype(input.dtype)
    pooled = torch.ops.torchvision.roi_align(
        input.detach().to(dtype),
        rois.detach().to(dtype),
        spatial_scale,
        aligned_height,
        aligned_width,
        sampling_ratio,
        aligned,
    )
    output.copy_(pooled)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Add the gradient of `roi_align_forward` to ``grad_input`` (n, c, h, w)."""
    _check_average(pool_mode)
    dtype = _compute_dtype(grad_output.dtype)
    gradient = torch.ops.torchvision._roi_align_backward(
        grad_output.to(dtype),
        rois.to(dtype),
        spatial_scale,
        aligned_height,
        aligned_width,
        *grad_input.shape,
        sampling_ratio,
        aligned,
    )
    grad_input.add_(gradient)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _check_average(pool_mode: int) -> None:
    if pool_mode != 1:
        raise UnavailableOpError(
            "RoIAlign with pool_mode='max' needs mmcv's compiled extension; torchvision's, in use "
            f"without it, averages. Use pool_mode='avg', or compile mmcv, {HOW_TO_COMPILE}"
        )


OPS: dict[str, Callable[..., Any]] = {
    "nms": nms,
    "roi_align_forward": roi_align_forward,
    "roi_align_backward": roi_align_backward,
}


class StandIn(types.ModuleType):
    """In the place of `mmcv._ext`: an attribute for every operator, so that `mmcv.ops` imports."""

    def __init__(self) -> None:
        super().__init__(EXTENSION, __doc__)
        self.__spec__ = importlib.machinery.ModuleSpec(EXTENSION, None, origin=__name__)
        self.__dict__.update(
            OPS,
            get_compiler_version=lambda: "none (torchvision's operators)",
            get_compiling_cuda_version=lambda: "none (torchvision's operators)",
        )

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {EXTENSION!r} has no attribute {name!r}")

        def unavailable(*_: Any, **__: Any) -> NoReturn:
            raise UnavailableOpError(
                f"mmcv's operator {name!r} needs mmcv's compiled extension, which is not in use; "
                f"without it there are {', '.join(OPS)}. To get it, compile mmcv, {HOW_TO_COMPILE}"
            )

        return unavailable


def install() -> None:
    """See to it that `mmcv.ops` can be imported; a second call changes nothing.

    Raises:
        ImportError: mmcv is not installed.
    """
    if source() is not None:
        return
    try:
        mmcv = importlib.import_module("mmcv")
    except ModuleNotFoundError as error:
        if error.name != "mmcv":
            raise
        raise ImportError(
            "fst.training.detection needs mmcv and mmdet: pip install 'fst-train[det]'"
        ) from error
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(
                f"mmcv's compiled extension does not load ({error}); torchvision's operators take "
                "its place. It was probably compiled for another version of torch",
                stacklevel=2,
            )
        sys.modules[EXTENSION] = mmcv._ext = StandIn()


def source() -> str | None:
    """Whose operators `mmcv.ops` has: "compiled", "torchvision", or None before `install`."""
    module = sys.modules.get(EXTENSION)
    if module is None:
        return None
    return "torchvision" if isinstance(module, StandIn) else "compiled"
