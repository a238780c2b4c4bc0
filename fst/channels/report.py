"""The report of a permutation of a model's channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fst.basics.text import table


class LayerMagnitude(NamedTuple):
    """The magnitude that N:M keeps of a layer's weight.

    Attributes:
        name: of the layer.
        total: Σ|w|.
        before, after: Σ|w| of what is kept, in the two orders of the channels.
        stays: why some or all of its input channels stayed in place; "" if none did.
    """

    name: str
    total: float
    before: float
    after: float
    stays: str


@dataclass
class PermutationReport:
    """The result of `permute`.

    Attributes:
        layers: one `LayerMagnitude` for each layer that is pruned along its input channels.
        families: sets of channels that got another order.
        difference: of the outputs on the example before and after, relative to their norm.
    """

    layers: list[LayerMagnitude]
    families: int
    difference: float

    @property
    def before(self) -> float:
        """Σ|w| that N:M kept in all layers."""
        return sum(layer.before for layer in self.layers)

    @property
    def after(self) -> float:
        """Σ|w| that N:M keeps in all layers."""
        return sum(layer.after for layer in self.layers)

    @property
    def total(self) -> float:
        """Σ|w| of all layers."""
        return sum(layer.total for layer in self.layers)

    def __str__(self) -> str:
        rows = [*self.layers, LayerMagnitude("all", self.total, self.before, self.after, "")]
        cells = [
            (row.name, f"{row.before / row.total:.2%}", f"{row.after / row.total:.2%}", row.stays)
            for row in rows
        ]
        lines = table(["layer", "kept before", "kept after", "channels that stay"], cells)
        return (
            f"{lines}\nsum of kept magnitudes {self.before:.6g} before, {self.after:.6g} after, of "
            f"{self.total:.6g}; {self.families} sets of channels permuted; the outputs on the "
            f"example differ by {self.difference:.1g} of their norm"
        )
