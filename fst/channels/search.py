"""The order of channels in which N:M along them keeps the largest magnitudes.

Source: Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021: an order is worth the
sum of the magnitudes that it keeps; channels of two groups change places while that sum grows, and
changes that lower it are tried to leave a local optimum.

Here the gains of all exchanges of two channels come from one matrix of distances. In a row, the n
largest of a group are the n − 1 largest of its m − 1 other channels and max(t, x), where t is the
n-th largest of those and x the channel's own magnitude; max(t, x) = (t + x + |t − x|) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = {"cpu": 128}  # at a time, with which torch.cdist is fastest in a CPU's cache
MOST_ROWS = 2**13
ROUNDING = 1e-5  # of a group's kept magnitude: gains below it are rounding errors


class Reader(NamedTuple):
    """Magnitudes by which rows of weights read the channels.

    Attributes:
        magnitudes: (channels, rows), not negative, contiguous.
        n: how many of each group of m consecutive channels stay in each row, 1 <= n < m.
    """

    magnitudes: Tensor
    n: int


def kept_magnitude(readers: Sequence[Reader], order: Tensor, m: int) -> float:
    """Σ of the n largest of each m consecutive channels in ``order``, in float64.

    Args:
        readers: of the same channels.
        order: (channels,), a multiple of m of them.
        m: size of the groups.
    """
    total = 0.0
    for magnitudes, n in readers:
        for part in magnitudes.split(MOST_ROWS, 1):
            kept = part[order.to(part.device)].unflatten(0, (-1, m)).topk(n, 1).values
            total += kept.sum(dtype=torch.float64).item()
    return total


def best_order(readers: Sequence[Reader], m: int, attempts: int) -> Tensor:
    """An order that keeps at least as much as the given one.

    Exchanges of two channels that gain most, one for each group, are made at once until none gains.
    Then each attempt exchanges some channels at random and descends again; it stands if it gains.
    Draws are seeded, so equal weights get equal orders.

    Args:
        readers: of the same channels, a multiple of ``m`` of them, on one device.
        m: size of the groups.
        attempts: number of them, at least 0.

    Returns:
        (channels,), int64, on the CPU: which channel stands at each place.
    """
    search = _Search(readers, m)
    native = search.groups.flatten()
    search.descend()
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(attempts if len(search.groups) > 1 else 0):
        search.attempt(generator)
    found = search.groups.flatten()
    better = kept_magnitude(readers, found, m) > kept_magnitude(readers, native, m)
    return (found if better else native).cpu()


class _Search:
    """Groups of channels, and what each exchange of two channels gains.

    Attributes:
        groups: (groups, m), the channels of each.
        worth: (channels, channels); at (i, j) what i's group keeps with j in the place of i.
        best: (groups, groups), the largest gain of an exchange between two groups.
    """

    def __init__(self, readers: Sequence[Reader], m: int) -> None:
        self.m = m
        first = readers[0].magnitudes
        channels, device = len(first), first.device
        self.groups = torch.arange(channels, device=device).view(-1, m)
        rows = ROWS.get(device.type, MOST_ROWS)
        self.parts = [
            Reader(part.contiguous(), n) for whole, n in readers for part in whole.split(rows, 1)
        ]
        self.totals = torch.stack([part.sum(1) for part, _ in self.parts]).sum(0)
        self.worth = first.new_empty(channels, channels)
        self.best = first.new_empty(channels // m, channels // m)
        self._update(torch.arange(channels // m, device=device))
        self.least = ROUNDING * self.kept() / len(self.groups)

    def kept(self) -> float:
        """Magnitude that all groups keep."""
        return self.worth.diagonal().sum(dtype=torch.float64).item() / self.m

    def descend(self) -> None:
        """Exchange channels while that gains."""
        while len(pairs := self._pairs()):
            one, two = pairs.unbind(1)
            number = torch.arange(len(one), device=one.device)
            exchange = self._gains(one)[number, :, two].flatten(1).argmax(1)
            self._exchange(one, exchange // self.m, two, exchange % self.m)

    def attempt(self, generator: torch.Generator) -> None:
        """Exchange channels of some groups at random and descend; go back where that loses."""
        before, kept, count = (self.groups, self.worth, self.best), self.kept(), len(self.groups)
        self.worth, self.best = self.worth.clone(), self.best.clone()
        for _ in range(2):
            drawn = 2 * max(1, min(4, count // 8))
            pairs = torch.randperm(count, generator=generator, device="cpu")[:drawn]
            places = torch.randint(self.m, pairs.shape, generator=generator, device="cpu")
            one, two = pairs.view(2, -1).to(self.groups.device)
            at, other = places.view(2, -1).to(self.groups.device)
            self._exchange(one, at, two, other)
        self.descend()
        if self.kept() < kept + self.least:
            self.groups, self.worth, self.best = before

    def _pairs(self) -> Tensor:
        """(pairs, 2) groups, none of them twice, that gain more by each other than by others."""
        gains, found = self.best.clone(), []
        number = torch.arange(len(gains), device=gains.device)
        while True:
            gain, partner = gains.max(1)
            chosen = (gain > self.least) & (partner[partner] == number) & (number < partner)
            first = chosen.nonzero()[:, 0]
            if not len(first):
                break
            found.append(torch.stack([first, partner[first]], 1))
            gains[found[-1].flatten()] = gains[:, found[-1].flatten()] = -torch.inf
        return torch.cat(found) if found else number.new_empty(0, 2)

    def _exchange(self, one: Tensor, at: Tensor, two: Tensor, other: Tensor) -> None:
        """Channels ``at`` these places of groups ``one`` for ``other`` ones of groups ``two``."""
        groups = self.groups.clone()
        groups[one, at], groups[two, other] = self.groups[two, other], self.groups[one, at]
        self.groups = groups
        self._update(torch.cat([one, two]))

    def _update(self, changed: Tensor) -> None:
        """`worth` and `best` where groups have ``changed``."""
        self.worth[self.groups[changed].flatten()] = self._worth(self.groups[changed])
        best = self._gains(changed).amax((1, 3))
        best[torch.arange(len(changed), device=changed.device), changed] = -torch.inf
        self.best[changed] = best
        self.best[:, changed] = best.T

    def _worth(self, groups: Tensor) -> Tensor:
        """Rows of `worth` of the channels of ``groups``: (groups · m, channels)."""
        distance = self.worth.new_zeros(groups.numel(), len(self.worth))
        rest = self.worth.new_zeros(groups.numel(), 1)
        for magnitudes, n in self.parts:
            own = magnitudes[groups]  # (groups, m, rows)
            largest = own.topk(n + 1, 1).values
            least, following = largest[:, n - 1 : n], largest[:, n:]
            last = torch.where(own >= least, following, least)  # t
            others = largest[:, :n].sum(1, keepdim=True) - torch.maximum(own, least)
            rest += (others + last / 2).sum(2).view(-1, 1)
            distance += torch.cdist(last.flatten(0, 1), magnitudes, p=1.0)
        return distance.add_(self.totals).div_(2).add_(rest)

    def _gains(self, groups: Tensor) -> Tensor:
        """Of exchanges between places of ``groups`` and of all groups: (groups, m, all, m)."""
        channels, every = self.groups[groups].flatten(), self.groups.flatten()
        now = self.worth.diagonal()
        gains = self.worth[channels][:, every] + self.worth[:, channels][every].T
        gains -= now[channels][:, None] + now[every]
        return gains.view(len(groups), self.m, len(self.groups), self.m)
