"""Unbiased weight gradients from a part of the output positions: sampling with centring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fst.basics.values import check_integer, one_of
from fst.rules.rule import Lattice, Rule, draw_of, kept_on_average

AXES = ("rows", "columns", "both", "samples")


@dataclass(frozen=True)
class Sampled(Rule):
    """Keep one of 2 or 4 output positions in grad_weight, drawn such that the mean is exact.

    Every position is kept by 1 of ``keep`` draws, and what is kept counts ``keep`` times, so the
    mean over draws is the exact gradient. The positions that are kept lie on a lattice, or on two:
    dense weight gradients with a larger stride. With ``center`` they see X − μ, μ the mean of X per
    channel; what μ contributes, (Σ dY)·μᵀ, is computed exactly (`fst.ops.centering`).

    Attributes:
        keep: one position of so many is kept: 2 or 4.
        axis: what of an output map is left out: "both" (a checkerboard, or one of each 2x2 block:
            the least variance, as neighbours resemble each other most along both axes), "rows" (the
            fastest on a CPU), "columns", or whole "samples", which costs most accuracy. A map that
            is one row or column is sampled along what it has.
        center: whether X is centred.
        min_size: output maps of fewer than min_size² positions are left dense, and so are those of
            one.
        phase: "random" draws at each step; a number is that draw at every step, which is biased.
        split: each of ``keep`` equal parts of the batch keeps other positions. With it a fixed
            ``phase``, which torch.compile needs, is exact in the mean over batches in random order,
            up to two errors that shrink with the batch: of samples that are left over where
            ``keep`` does not divide it and, centred, of the samples that μ is taken from. Not with
            axis="samples".
        prefix_tokens: so many positions at the beginning of a map that is one row are kept by every
            draw, and count once: a transformer's class token and registers, which may have most of
            the gradient. Not with axis="samples". None: as many as
            `fst.convert` finds in the model, else none.
    """

    operand: str = "input"
    keep: int = 2
    axis: str = "both"
    center: bool = True
    min_size: int = 0
    phase: int | str = "random"
    split: bool = False
    prefix_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operand != "input":
            raise ValueError(f"operand={self.operand!r}: 'sampled' prunes operand='input'.")
        one_of("keep", self.keep, (2, 4))
        one_of("axis", self.axis, AXES)
        one_of("center", self.center, (True, False))
        one_of("split", self.split, (True, False))
        check_integer("min_size", self.min_size, 0)
        if self.prefix_tokens is not None:
            check_integer("prefix_tokens", self.prefix_tokens, 0)
        for name in ("prefix_tokens", "split"):
            if getattr(self, name) and self.axis == "samples":
                raise ValueError(
                    f"{name}={getattr(self, name)} needs axis='rows', 'columns' or 'both'; "
                    "axis='samples' drops whole samples."
                )
        one_of("phase", self.phase, (*range(self.draws), "random"))

    @property
    def draws(self) -> int:
        return self.keep

    def leaves_dense(self, height: int, width: int) -> bool:
        return height * width < max(2, self.min_size**2)

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...]:
        if self.axis == "samples":
            return (Lattice(0, 1, 0, 1, phase, self.keep),)
        axis = "columns" if height == 1 else "rows" if width == 1 else self.axis
        parts = self.keep if self.split else 1
        found = [
            lattice._replace(part=part, parts=parts)
            for part in range(parts)
            for lattice in self._lattices(axis, (phase + part) % self.keep)
        ]
        if height > 1 or not self.prefix_tokens:
            return tuple(found)
        prefix = range(min(self.prefix_tokens, width))
        rest = (p._replace(column=p.column + len(prefix)) for p in found)
        return (*rest, *(Lattice(0, 1, n, width, weight=1 / self.keep) for n in prefix))

    def _lattices(self, axis: str, phase: int) -> list[Lattice]:
        if axis == "rows":
            return [Lattice(phase, self.keep, 0, 1)]
        if axis == "columns":
            return [Lattice(0, 1, phase, self.keep)]
        round_block = ((0, 0), (0, 1), (1, 1), (1, 0))
        places = round_block[phase :: self.keep]
        return [Lattice(row, 2, column, 2) for row, column in places]

    def with_prefix_tokens(self, count: int) -> Sampled:
        if self.prefix_tokens is None and count and self.axis != "samples":
            return replace(self, prefix_tokens=count)
        return self

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        return draw_of(self.phase, self.draws, generator, seed)

    @property
    def is_random(self) -> bool:
        return self.phase == "random"

    @property
    def scale(self) -> float:
        return float(self.keep)

    @property
    def centers(self) -> bool:
        return self.center

    @property
    def density(self) -> float:
        return 1 / self.keep

    def kept(
        self, gemm: str, weight: Sequence[int], groups: int, height: int, width: int
    ) -> tuple[float, float]:
        if self.leaves_dense(height, width):
            return 1, 1
        return kept_on_average(self, height, width)

    @property
    def acceleration(self) -> str:
        return f"strided weight gradient with 1/{self.keep} of the multiply-adds{self._prefix}"

    @property
    def _prefix(self) -> str:
        return f", {self.prefix_tokens} prefix tokens exact" if self.prefix_tokens else ""

    def __str__(self) -> str:
        centred = "centred" if self.center else "not centred"
        least = f", dense below {self.min_size}x{self.min_size}" if self.min_size else ""
        axis = self.axis
        if axis == "both":
            axis = "checkerboard" if self.keep == 2 else "2x2 blocks"
        return (
            f"{self.operand} sampled, 1 of {self.keep} by {axis}, {centred}, "
            f"phase {self.phase}{', split' if self.split else ''}{least}{self._prefix}"
        )
