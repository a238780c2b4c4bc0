"""Axes of tensors, and which of their channels must be permuted together.

An axis is a row of pieces, each of which is a family of channels times a number of neighbours: the
maps of two layers one after the other are two pieces, maps (C, H, W) flattened are C times H·W.
Families are merged where an operation pairs their channels, and divided where a part of them goes
another way. A pinned family stays in place, for the first reason that was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """The channels of ``family``, each of them ``inner`` neighbouring elements of an axis."""

    family: int
    inner: int


Axis = tuple[Piece, ...]


class Axes:
    """All families of channels of a model."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._pinned: dict[int, str] = {}
        self._became: dict[int, Axis] = {}

    def new(self, size: int, pinned: str = "") -> Axis:
        """An axis of one family; ``pinned`` says why that stays in place, "" if it need not."""
        self._sizes.append(size)
        family = len(self._sizes) - 1
        if pinned:
            self._pinned[family] = pinned
        return (Piece(family, 1),)

    def size(self, family: int) -> int:
        """Channels of a family."""
        return self._sizes[family]

    def pinned(self, family: int) -> str:
        """Why a family stays in place; "" if it need not."""
        return self._pinned.get(family, "")

    def length(self, axis: Axis) -> int:
        """Elements of an axis."""
        return sum(self._sizes[family] * inner for family, inner in axis)

    def now(self, axis: Axis) -> Axis:
        """The axis in families that were neither merged into others nor divided."""
        return tuple(self._now(axis))

    def _now(self, axis: Axis) -> Iterator[Piece]:
        for family, inner in axis:
            if family in self._became:
                yield from self._now(times(self._became[family], inner))
            else:
                yield Piece(family, inner)

    def pin(self, axis: Axis, reason: str) -> None:
        """Leave all channels of an axis in place."""
        for family, _ in self.now(axis):
            self._pinned.setdefault(family, reason)

    def unite(self, one: Axis, other: Axis, reason: str) -> None:
        """Channels at equal places of two axes of equal length move together.

        Those whose pieces do not fit are pinned, for ``reason``.
        """
        while True:
            first, second = self.now(one), self.now(other)
            unequal = (a != b for a, b in zip(first, second, strict=False))
            at = next(itertools.compress(itertools.count(), unequal), None)
            if at is None:
                return
            pair = first[at], second[at]
            if not (self._join(*pair) or self._join(*reversed(pair))):
                self.pin(first[at:] + second[at:], reason)
                return

    def _join(self, part: Piece, whole: Piece) -> bool:
        """Let ``part`` be the first channels of ``whole``, or all of them; False where it cannot.

        Of one family they are equal or do not fit, so no family becomes a part of itself.
        """
        length = self.length((part,)) // whole.inner
        if part.inner % whole.inner or length > self._sizes[whole.family]:
            return False
        self._divide(whole.family, (Piece(part.family, part.inner // whole.inner),))
        return True

    def _divide(self, family: int, first: Axis) -> None:
        """``first`` takes the place of a family's first channels, a new family that of the rest."""
        rest = self._sizes[family] - self.length(first)
        self._became[family] = first + (self.new(rest) if rest else ())
        if reason := self.pinned(family):
            self.pin(self._became[family], reason)

    def part(self, axis: Axis, start: int, end: int, reason: str) -> Axis:
        """Elements ``start`` to ``end`` of an axis, which stays if a channel is cut."""
        if self._cut(axis, start) and self._cut(axis, end):
            places = self._places(axis)
            return tuple(piece for at, piece in places if start <= at < end)
        self.pin(axis, reason)
        return self.new(end - start, reason)

    def _cut(self, axis: Axis, at: int) -> bool:
        """Let a piece begin at an element; False if that is within a channel."""
        for start, (family, inner) in self._places(axis):
            channels, within = divmod(at - start, inner)
            if 0 < at - start < self._sizes[family] * inner:
                if not within:
                    self._divide(family, self.new(channels))
                return not within
        return True

    def _places(self, axis: Axis) -> list[tuple[int, Piece]]:
        """Pieces of an axis, and where each begins."""
        places, start = [], 0
        for piece in self.now(axis):
            places.append((start, piece))
            start += self.length((piece,))
        return places

    def reshaped(self, axes: Sequence[Axis], shape: Sequence[int], reason: str) -> list[Axis]:
        """The axes of a tensor with ``axes`` after its elements, in their order, get ``shape``.

        Merged axes keep the channels of the first, divided ones those of whole channels; others are
        pinned, for ``reason``.
        """
        left = [axis for axis in axes if self.length(axis) != 1]
        result = []
        for size in shape:
            merged, missing = None, size
            while missing > 1:
                axis = left.pop(0)
                length = self.length(axis)
                if length > missing and length % missing == 0:
                    axis, rest = self._split(axis, length // missing, reason)
                    left.insert(0, rest)
                    length = missing
                if missing % length:
                    for axis in axes:
                        self.pin(axis, reason)
                    return [self.new(size, reason) for size in shape]
                missing //= length
                if merged is None:
                    merged = times(axis, missing)
                else:
                    self.pin(axis, reason)
            result.append(self.new(1, reason) if merged is None else merged)
        return result

    def _split(self, axis: Axis, within: int, reason: str) -> tuple[Axis, Axis]:
        """An axis as two, the second of ``within`` elements."""
        pieces = self.now(axis)
        rest = self.new(within, reason)
        if all(inner % within == 0 for _, inner in pieces):
            return tuple(Piece(family, inner // within) for family, inner in pieces), rest
        self.pin(axis, reason)
        return self.new(self.length(axis) // within, reason), rest


def times(axis: Axis, inner: int) -> Axis:
    """An axis each of whose elements is ``inner`` neighbours."""
    return tuple(Piece(family, own * inner) for family, own in axis)
