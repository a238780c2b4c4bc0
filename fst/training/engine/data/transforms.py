"""Transforms of single images, named in configs: torchvision's v2, timm's, progressive resizing.

Only the crop whose size follows the epoch is defined here, because torchvision lacks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, v2

from fst.basics.text import nearest

_ELSEWHERE = {  # what the data preprocessor does
    **dict.fromkeys(("ToTensor", "ToImage", "ToDtype", "Normalize"), "mean and std"),
    **dict.fromkeys(("MixUp", "CutMix"), "mixup"),
}


class ProgressiveRandomResizedCrop(v2.RandomResizedCrop):
    """Random-resized crop whose size grows with the epoch, as in SDGP's (FFCV's) ImageNet recipe.

    ``min_size`` until ``start_epoch``, then linearly to ``max_size`` at ``end_epoch``, rounded to a
    multiple of ``multiple``. The epoch arrives with the samples, so workers need no notice.

    Args:
        min_size: First size.
        max_size: Last size.
        start_epoch: Epoch at which growth begins.
        end_epoch: Epoch from which the size is ``max_size``.
        multiple: Sizes are multiples of it.
        **kwargs: Other arguments of torchvision's `RandomResizedCrop`.
    """

    def __init__(
        self,
        min_size: int = 160,
        max_size: int = 192,
        start_epoch: int = 0,
        end_epoch: int = 1,
        multiple: int = 32,
        **kwargs: Any,
    ) -> None:
        if not 0 <= start_epoch < end_epoch:
            raise ValueError(f"start_epoch={start_epoch} must be less than end_epoch={end_epoch}.")
        if not 0 < min_size <= max_size or min_size % multiple or max_size % multiple:
            raise ValueError(
                f"min_size={min_size} and max_size={max_size} must be increasing multiples of "
                f"multiple={multiple}."
            )
        super().__init__(min_size, **kwargs)
        self.sizes, self.epochs, self.multiple = (
            (min_size, max_size),
            (start_epoch, end_epoch),
            multiple,
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by the dataset before each batch."""
        (low, high), (start, end) = self.sizes, self.epochs
        progress = min(max((epoch - start) / (end - start), 0.0), 1.0)
        side = int(round((low + progress * (high - low)) / self.multiple)) * self.multiple
        self.size = (side, side)


def timm_transform(**options: Any) -> Callable[[Any], Any]:
    """timm's `create_transform`, without the normalisation, which the preprocessor does.

    Raises:
        ValueError: erasing, which timm would skip here.
    """
    if options.get("re_prob"):
        raise ValueError(
            f"re_prob={options['re_prob']!r}: erasing needs normalised images; use the "
            "preprocessor's random_erasing=dict(probability=...)."
        )
    return create_transform(**options, use_prefetcher=True)


def as_bytes(image: Any) -> torch.Tensor:
    """The result of transforms, a tensor uint8 (C, H, W).

    Raises:
        ValueError: it is none.
    """
    is_file = isinstance(image, Image.Image)
    image = v2.functional.pil_to_tensor(image) if is_file else torch.as_tensor(image)
    if image.dtype != torch.uint8 or image.dim() != 3:
        raise ValueError(
            f"the transforms gave a {image.dtype} tensor of shape {tuple(image.shape)}; they "
            "must give a uint8 image (C, H, W)."
        )
    return image


def build_transforms(configs: Sequence[dict[str, Any]]) -> list[Callable[[Any], Any]]:
    """The transforms that a dataset's ``transforms`` argument names."""
    if isinstance(configs, dict):
        raise ValueError(f"transforms={configs!r} must be a list of dicts with a 'type'.")
    return [_built(**config) for config in configs]


def _built(type: str, **options: Any) -> Callable[[Any], Any]:
    own = {"ProgressiveRandomResizedCrop": ProgressiveRandomResizedCrop, "timm": timm_transform}
    known = {n: v for n, v in vars(v2).items() if inspect.isclass(v)} | own
    if type in _ELSEWHERE:
        raise ValueError(
            f"transform {type!r} is not allowed: images stay uint8 and single until the data "
            f"preprocessor; use its {_ELSEWHERE[type]}."
        )
    if type not in known:
        raise ValueError(f"transform type {type!r} is unknown.{nearest(type, known)}")
    if type != "timm" and isinstance(options.get("interpolation"), str):
        options["interpolation"] = InterpolationMode(options["interpolation"])
    try:
        return known[type](**options)
    except TypeError as error:
        raise ValueError(f"transform {type!r}: {error}") from error
