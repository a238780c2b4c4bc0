"""The options of a written file."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
AXES = {0: "batch", 2: "height", 3: "width"}


class Options(NamedTuple):
    """Options of a file.

    Attributes:
        dynamic_batch: it takes any batch size.
        dynamic: it takes maps (N, C, H, W) of other heights and widths.
        opset: version of ONNX's operators; None: the exporter's own.
        compressed: N:M weights are kept as values and positions.
    """

    dynamic_batch: bool = True
    dynamic: bool = False
    opset: int | None = None
    compressed: bool = False

    def axes(self, value: Tensor) -> dict[int, str]:
        """The axes of an input that may have another size, and their names."""
        sizes = self.dynamic and value.dim() == 4
        return {i: name for i, name in AXES.items() if (sizes if i else self.dynamic_batch)}

    def shapes(self, inputs: Inputs) -> tuple[dict[int, Any], ...] | None:
        """The dynamic shapes of `torch.export`; None where all are fixed."""
        dims = {
            "batch": torch.export.Dim("batch"),
            # of sizes that a model may divide by 32, say, which a named one does not allow
            **dict.fromkeys(("height", "width"), torch.export.Dim.DYNAMIC),
        }
        found = tuple({i: dims[name] for i, name in self.axes(x).items()} for x in inputs)
        return found if any(found) else None
