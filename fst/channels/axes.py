"""Axes of tensors, and which of their channels must be permuted together.

An axis is the number of the channel at each of its elements: a map (C, H, W) flattened has each
number H·W times. Channels are united where an operation pairs them. Channels may change places with
those that stand in the same axes. A pinned channel stays in place, for the first reason that was
found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Axis = tuple[int, ...]


class Axes:
    """All channels of a model."""

    def __init__(self) -> None:
        self._same: list[int] = []  # channel -> itself, or one before it that it was united with
        self._pinned: dict[int, str] = {}
        self._counted: list[tuple[Axis, str]] = []
        self._parts: list[Axis] = []

    def new(self, size: int, pinned: str = "") -> Axis:
        """An axis of new channels; ``pinned`` says why they stay in place, "" if they need not."""
        axis = tuple(range(len(self._same), len(self._same) + size))
        self._same += axis
        if pinned:
            self.pin(axis, pinned)
        return axis

    def now(self, axis: Axis) -> Axis:
        """The axis with one number for all channels that were united."""
        return tuple(map(self._first, axis))

    def _first(self, channel: int) -> int:
        same = self._same
        while same[channel] != channel:
            same[channel] = same[same[channel]]
            channel = same[channel]
        return channel

    def pinned(self, channel: int) -> str:
        """Why a channel stays in place; "" if it need not."""
        return self._pinned.get(self._first(channel), "")

    def pin(self, axis: Axis, reason: str) -> None:
        """Leave all channels of an axis in place."""
        for channel in self.now(axis):
            self._pinned.setdefault(channel, reason)

    def counted(self, channel: int) -> str:
        """Why the number of channels on this axis must stay; "" if it may change."""
        channel = self._first(channel)
        return next((reason for axis, reason in self._counted if channel in self.now(axis)), "")

    def count(self, axis: Axis, reason: str) -> None:
        """The number of channels of an axis matters."""
        self._counted.append((axis, reason))

    def unite(self, one: Axis, other: Axis) -> None:
        """Channels at equal places of two axes of equal length move together."""
        for pair in zip(one, other, strict=True):
            first, second = sorted(map(self._first, pair))
            self._same[second] = first
            if second in self._pinned:
                self._pinned.setdefault(first, self._pinned[second])

    def part(self, axis: Axis, start: int, end: int, reason: str) -> Axis:
        """Elements ``start`` to ``end`` of an axis, which stays if a channel is cut."""
        whole = self.now(axis)
        if any(whole[at - 1] == whole[at] for at in (start, end) if 0 < at < len(whole)):
            self.pin(axis, reason)
        self._parts.append(axis[start:end])
        return axis[start:end]

    def reshaped(self, axes: Sequence[Axis], shape: Sequence[int], reason: str) -> list[Axis]:
        """The axes of a tensor with ``axes`` after its elements, in their order, get ``shape``.

        Merged axes keep the channels of the first, divided ones those of whole channels; others are
        pinned, for ``reason``. Where an axis of one element goes is a guess.
        """
        left, result = list(axes), []
        for size in shape:
            merged, missing = None, size
            if size == 1 and left and len(left[0]) == 1:
                merged = left.pop(0)
            while missing > 1:
                axis = left.pop(0)
                if len(axis) == 1 and len(left[0]) >= missing:
                    continue
                if len(axis) > missing and len(axis) % missing == 0:
                    within = len(axis) // missing
                    left.insert(0, self.new(within, reason))
                    axis = self._every(axis, within, reason)
                if missing % len(axis):
                    for axis in axes:
                        self.pin(axis, reason)
                    return [self.new(size, reason) for size in shape]
                missing //= len(axis)
                if merged is None:
                    merged = times(axis, missing)
                else:
                    self.pin(axis, reason)
            result.append(self.new(1, reason) if merged is None else merged)
        return result

    def _every(self, axis: Axis, within: int, reason: str) -> Axis:
        """One of each ``within`` elements, which stay if they are of several channels."""
        if self.now(axis) != self.now(times(axis[::within], within)):
            self.pin(axis, reason)
        return axis[::within]

    def families(self, axes: Iterable[Axis]) -> list[Axis]:
        """The channels of ``axes`` that may change places with each other, in ascending order.

        Those of a family are all pinned, or none is.
        """
        places: dict[int, list[int]] = {}
        for number, axis in enumerate([*axes, *self._parts]):
            for channel in self.now(axis):
                places.setdefault(channel, []).append(number)
        found: dict[tuple[object, ...], list[int]] = {}
        for channel in sorted(places):
            key = (self.pinned(channel), *places[channel])
            found.setdefault(key, []).append(channel)
        return [tuple(family) for family in found.values()]


def times(axis: Axis, inner: int) -> Axis:
    """An axis each of whose elements is ``inner`` neighbours."""
    return tuple(channel for channel in axis for _ in range(inner))
