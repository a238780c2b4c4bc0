"""FSDP2 on two ranks (gloo) trains random networks as DistributedDataParallel does.

There ranks with seeds of their own train one network.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fst
from tests import two_ranks
from tests.campaign.shared import Checks
from tests.integrations.sharded import REFUSED, ROWS, STEPS, TABLE, row_of, whole

COUNT = 3  # of each strategy, at scale 1
ALONE = ("prunetrain",)  # refuses several ranks
TOLERANCE, OF_ADAM = 1e-12, 1e-8  # Adam divides by the size of gradients that are nearly 0


def checks() -> Checks:
    """Each strategy that trains on sharded weights, and each that trains on two ranks."""
    names = [name for name, what in TABLE.items() if what != REFUSED]
    return [
        *((name, COUNT, functools.partial(_check, _compare, name)) for name in names),
        *((f"alike-{n}", 1, functools.partial(_check, _alike, n)) for n in TABLE if n not in ALONE),
    ]


def _check(act: Callable[[str, int, int], None], strategy: str, draw: random.Random) -> None:
    """Both ranks run the case of the same seed."""
    with tempfile.TemporaryDirectory() as folder:
        two_ranks.run(functools.partial(act, strategy, draw.getrandbits(32)), Path(folder))


class _Training:
    """The options of one loop, drawn alike on both ranks."""

    def __init__(self, strategy: str, draw: random.Random) -> None:
        self.row = ROWS[row_of(strategy)]
        self.widths = [draw.randint(3, 12) for _ in range(2)]
        self.batches = draw.choice((1, 1, 2))
        self.clip = draw.random() < 0.4
        self.adam = strategy == "step" or draw.random() < 0.3 and strategy != "resprop"
        self.linear = draw.random() < 0.6
        self.reshard = draw.choice((True, False))
        self.apart = draw.sample((0, 2, 4), draw.randint(0, 3))
        self.seed = draw.getrandbits(16)

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        first, second = self.widths
        net = nn.Sequential(
            *(nn.Conv2d(4, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3)),
            *(nn.ReLU(), nn.Conv2d(second, 8, 1), nn.Flatten(), nn.Linear(72, 4)),
        ).double()
        kinds = [nn.Conv2d, nn.Linear] if self.linear else [nn.Conv2d]
        fst.convert(net, self.row(), include=kinds)
        return net

    def shard(self, net: nn.Sequential) -> None:
        for index in self.apart:
            fully_shard(net[index], reshard_after_forward=self.reshard)
        fully_shard(net, reshard_after_forward=self.reshard)

    def train(self, net: nn.Module, called: nn.Module, rank: int) -> None:
        kind: Any = (
            torch.optim.AdamW if self.adam else functools.partial(torch.optim.SGD, momentum=0.9)
        )
        optimizer = kind(net.parameters(), lr=0.02)
        attachment = fst.attach(net, optimizer, total_steps=STEPS, steps_per_epoch=2)
        for step in range(STEPS):
            for batch in range(self.batches):
                generator = torch.Generator().manual_seed(1000 * step + 10 * batch + rank)
                images = torch.randn(3, 4, 5, 5, generator=generator, dtype=torch.float64)
                loss = called(images).square().mean()
                attachment.report_loss(loss)
                loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def _compare(strategy: str, seed: int, rank: int) -> None:
    training = _Training(strategy, random.Random(seed))
    net, other, before = (training.network() for _ in range(3))
    for trained in (net, other):
        fst.seed_random_rules(trained, training.seed, rank)
    training.shard(net)
    training.train(net, net, rank)
    training.train(other, nn.parallel.DistributedDataParallel(other), rank)
    tolerance = OF_ADAM if training.adam else TOLERANCE
    what = f"{strategy}, {vars(training)}"
    moved = 0.0
    for (name, mine), theirs, old in zip(
        net.named_parameters(), other.parameters(), before.parameters(), strict=True
    ):
        off = float((whole(mine) - theirs).abs().max())
        assert off <= tolerance, f"{name} is {off:.1e} off DDP's: {what}"
        moved = max(moved, float((theirs - old).abs().max()))
    assert moved > 1e-5, f"nothing trained: {what}"
    for name, layer in fst.sparse_layers(net).items():
        mine, theirs = layer.output_mask(), fst.sparse_layers(other)[name].output_mask()
        same = mine is theirs or torch.equal(mine, theirs)
        assert same, f"the mask of {name} differs: {what}"


def _alike(strategy: str, seed: int, rank: int) -> None:
    training = _Training(strategy, random.Random(seed))
    net = training.network()
    torch.manual_seed(rank)
    training.train(net, nn.parallel.DistributedDataParallel(net), rank)
    for name, mine in net.state_dict().items():
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs), f"{name} differs: {strategy}, {vars(training)}"
