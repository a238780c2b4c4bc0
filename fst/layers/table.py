"""The table of a model's layers: a row for each weight; each report shows some of its columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fst.backends import Decision
from fst.basics.text import table
from fst.layers.coverage import group_length, inside_groups
from fst.rules.rule import WeightGroups

NOT_N_M = "converted, weights not N:M"


class GemmReport(NamedTuple):
    """Computation of one GEMM of a layer.

    Attributes:
        mode: "dense" (nothing pruned), "simulated" (dense arithmetic on pruned values, so no time
            is saved), "accelerated" (fewer multiply-adds are done), "may be accelerated" (the first
            backward pass tells) or "not computed".
        rule: what is pruned; "" where dense.
        reason: why it is so.
        decision: which backend computed it last, and why; None before that, and where there is
            nothing to choose (see `backends_table`).
    """

    mode: str
    rule: str
    reason: str
    decision: Decision | None = None

    def __str__(self) -> str:
        return f"{self.mode}: {self.rule}" if self.rule else self.mode


@dataclass(frozen=True)
class LayerRow:
    """A weight of a convolution or linear layer: how much of it is N:M, and how it is multiplied.

    Attributes:
        name: of the parameter.
        shape: (Cout, Cin/groups, ...); () where a lazy layer does not know it yet.
        groups: the N:M that it has, or should have; None where there is none.
        reason: why nothing of it counts as N:M, whatever ``groups`` are, or why it is not packed.
        density: share of non-zero elements; None where it was not counted.
        offence: the first group with more than N non-zero elements, as text, or None.
        is_checked: whether its values were checked to be N:M.
        multiply_adds: of the layer in a forward pass; None where unknown.
        gemms: how each product of a converted layer is computed; "output" of a packed one; empty of
            others.
        follows: what became part of a packed layer: "batch norm", "residual", an activation.
    """

    name: str
    shape: tuple[int, ...]
    groups: WeightGroups | None = None
    reason: str = ""
    density: float | None = None
    offence: str | None = None
    is_checked: bool = True
    multiply_adds: int | None = None
    gemms: Mapping[str, GemmReport] = field(default_factory=dict)
    follows: tuple[str, ...] = ()

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.name.rpartition(".")[0]

    @property
    def decision(self) -> Decision:
        """The latest one about its output; of no backend where there is none."""
        return (self.gemms["output"].decision if self.gemms else None) or Decision("output", "", "")

    @property
    def ok(self) -> bool:
        """True if no group has more than N non-zero elements."""
        return self.offence is None

    @property
    def size(self) -> int:
        """Its elements; 0 where a lazy layer does not know them yet."""
        return math.prod(self.shape) if self.shape else 0

    @property
    def inside(self) -> int:
        """Elements in full groups of M, which the pattern prunes."""
        if self.groups is None or self.reason or self.offence:
            return 0
        return inside_groups(self.shape, *self.groups)

    @property
    def macs_inside(self) -> float:
        """Multiply-adds with those elements."""
        return (self.multiply_adds or 0) * _share(self.inside, self.size)

    @property
    def is_exempt(self) -> bool:
        """True if all of its groups are shorter than M, as in depthwise layers."""
        return self.groups is not None and group_length(self.shape, self.groups) < self.groups.m

    @property
    def pattern(self) -> str:
        """ "N:M", with " along im2col" where its groups run so; "" where nothing is N:M."""
        return _named(self.groups) if self.groups is not None and self.inside else ""

    @property
    def label(self) -> str:
        """Its row in the summary of a model."""
        if self.reason or self.groups is None:
            return self.reason or NOT_N_M
        if self.offence:
            return f"not {_named(self.groups)}" + ("" if self.is_checked else ", not checked")
        if self.is_exempt:
            return exempt(self.groups.m)
        return self.pattern or f"{_named(self.groups)}, which prunes nothing"


Columns = Mapping[str, Callable[[LayerRow], object]]  # header -> cell
WEIGHTS: Columns = {
    "weight": lambda row: row.name,
    "shape": lambda row: "x".join(map(str, row.shape)),
    "density": lambda row: "-" if row.density is None else f"{row.density:.3f}",
    "pattern": lambda row: f"{row.label}: {row.offence}" if row.offence else row.label,
}


@dataclass(frozen=True)
class LayerTable:
    """The weights of a model's convolutions and linear layers.

    Biases, and weights in modules of other types, are in no number. ``str()`` is a table of how
    many are N:M, exempt, or neither and why; `text` has a row for each.
    """

    rows: tuple[LayerRow, ...] = ()

    @property
    def parameters(self) -> float:
        """Share of the weights' elements in full N:M groups, 0 to 1."""
        return _share(sum(row.inside for row in self.rows), sum(row.size for row in self.rows))

    @property
    def multiply_adds(self) -> float | None:
        """Share of the multiply-adds of the layers that were called; None if not counted."""
        if all(row.multiply_adds is None for row in self.rows):
            return None
        inside = sum(row.macs_inside for row in self.rows)
        return _share(inside, sum(row.multiply_adds or 0 for row in self.rows))

    def text(self, columns: Columns = WEIGHTS, *, merged: bool = False) -> str:
        """A table of the rows.

        Args:
            columns: the first one is a name.
            merged: rows whose names differ in numbers alone share one if all else is equal.
        """
        shared: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            name, *cells = (str(cell(row)) for cell in columns.values())
            shared.setdefault((re.sub(r"\d+", "*", name) if merged else name, *cells), []).append(
                name
            )
        return table((*columns,), ((_common(names), *key[1:]) for key, names in shared.items()))

    def __str__(self) -> str:
        is_counted = self.multiply_adds is not None
        kinds: dict[str, list[float]] = {}  # layers, elements, multiply-adds
        for row in self.rows:
            rest, macs = row.size - row.inside, float(row.multiply_adds or 0)
            parts = [(row.label, 1, row.inside or rest, row.macs_inside if row.inside else macs)]
            if row.inside and rest and row.groups is not None:
                parts.append((exempt(row.groups.m), 0, rest, macs - row.macs_inside))
            for label, *numbers in parts:
                kind = kinds.setdefault(label, [0, 0, 0])
                kind[:] = (a + b for a, b in zip(kind, numbers, strict=True))
        totals = [sum(kind[i] for kind in kinds.values()) for i in range(3)]
        header = ["weights", "layers", "parameters", "share"]
        header += ["multiply-adds of the example", "share"] if is_counted else []
        cells = []
        ordered = sorted(kinds.items(), key=lambda kind: not kind[0][0].isdigit())  # N:M first
        for label, (layers, size, macs) in [*ordered, ("all", totals)]:
            shown = [label, layers, f"{size:,}", f"{_share(size, totals[1]):.1%}"]
            shown += [f"{macs:,.0f}", f"{_share(macs, totals[2]):.1%}"] if is_counted else []
            cells.append(shown)
        return table(header, cells)


def exempt(m: int) -> str:
    """The label of what lies in groups of fewer than ``m``."""
    return f"exempt: groups of fewer than {m}"


def _named(groups: WeightGroups) -> str:
    along = "" if groups.group_order == "channel" else f" along {groups.group_order}"
    return f"{groups.n}:{groups.m}{along}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _common(names: list[str]) -> str:
    """One name for names that differ in numbers alone: those numbers become "*"."""
    if len(names) == 1:
        return names[0]
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    common = "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
    return f"{common} ({len(names)} layers)"
