"""Which extra of this distribution brings a package that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRA_OF = {
    **dict.fromkeys(
        "mmengine torchvision timm numpy cv2 PIL yaml sklearn "
        "scipy tensorboard matplotlib rich msgspec".split(),
        "train",
    ),
    **dict.fromkeys(("mmcv", "mmdet"), "det"),
    **dict.fromkeys(("lightning", "accelerate"), "integrations"),
    **dict.fromkeys(("sphinx", "furo", "myst_parser", "myst_nb", "sphinx_design"), "docs"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript", "safetensors"), "export"),
    **dict.fromkeys(
        ("ultralytics", "segmentation_models_pytorch", "transformers", "pycocotools"), "recipes"
    ),
    "openvino": "bench",
}


def how_to_get(package: str) -> str:
    """The command that installs ``package``, or "" where no extra brings it."""
    extra = EXTRA_OF.get(package.partition(".")[0])
    return f"pip install 'fst-train[{extra}]'" if extra else ""


def in_words(error: ModuleNotFoundError) -> str:
    """The error, and the command that mends it."""
    command = how_to_get(error.name or "")
    return f"{error.name} is not installed: {command}" if command else str(error)


@contextmanager
def extra_named() -> Iterator[None]:
    """Imports within that fail for want of an extra say how to install it.

    Raises:
        ModuleNotFoundError: a package is missing; its message holds the command of `how_to_get`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not how_to_get(error.name or ""):
            raise
        raise ModuleNotFoundError(in_words(error), name=error.name) from error
