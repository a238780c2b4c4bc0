"""Things that a packed layer has made of its tensors; it sees when these have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fst.ops.geometry import Geometry


class Folded(NamedTuple):
    """Weight and bias of a layer, batch norm included.

    Attributes:
        weight: in the dtype of the products, as a convolution's: (Cout, Cin/groups, kh, kw).
        bias: (Cout,) in the same dtype, or None.
        exact_bias: ``bias`` in float32.
    """

    weight: Tensor
    bias: Tensor | None
    exact_bias: Tensor | None


@dataclass(eq=False)
class Known:
    """Things made of a layer's tensors, for as long as nothing of it changes.

    Attributes:
        numbers: of the layer and its batch norm.
        versions: of the tensors.
        tensors, memory: are kept, so that no identity and no address is used again.
        folded: weight and bias.
        geometry: of the convolution.
        prepacked: oneDNN's layout of the weight, which F.conv2d makes at each call; or None.
        lists: of each way by zeros, the weight's numbers for the first form.
    """

    numbers: tuple[Any, ...]
    versions: list[Any]
    tensors: list[Tensor | None]
    memory: list[Tensor | None]
    folded: Folded
    geometry: Geometry
    prepacked: Tensor | None = None
    lists: dict[str, Tensor] = field(default_factory=dict)


def versions_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Which tensors they are, in which state; one that counts no changes is never the same."""
    return [
        x if x is None else (id(x), object() if x.is_inference() else x._version, x.data_ptr())
        for x in tensors
    ]
