"""No exit from `fst.frozen` leaves a layer frozen, and within the block S(W) is the weight's."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.basics.errors import UsageError
from fst.layers.modules import SparseLayer
from tests.campaign.shared import Checks

STRATEGIES = ("srste", "fst", "fst_w", "sdgp", "tsm", "gg", "mvue", "fst_sampled", "sste")


class Stopped(BaseException):
    """What no code but the campaign's own catches."""


class Situation:
    """A converted net in a block of `fst.frozen`, and all layers that were ever in it."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.strategy = draw, draw.choice(STRATEGIES)
        torch.manual_seed(draw.getrandbits(32))
        kernel, groups = draw.choice((1, 3)), draw.choice((1, 2))
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 8, kernel, padding=1, groups=groups),
            nn.Conv2d(8, 4, 1),
        )
        fst.convert(self.net, self.strategy)
        self.seen: list[nn.Module] = [*self.net]

    def call(self, net: nn.Module | None = None) -> Tensor:
        return (net or self.net)(torch.randn(2, 4, 6, 6))


Exit = Callable[[Situation], object]


def _raised(error: BaseException, s: Situation) -> None:
    """In the middle of a call."""

    def fail(*_: object) -> None:
        raise error

    handle = s.net[1].register_forward_pre_hook(fail)
    try:
        s.call()
    finally:
        handle.remove()


def _copied(copied: Callable[[nn.Module], nn.Module], s: Situation) -> None:
    other = copied(s.net)
    s.seen += other.children()
    s.call(other)


def _replaced(s: Situation) -> None:
    s.net[0] = nn.Conv2d(4, 8, 3, padding=1)
    fst.convert(s.net[0], s.strategy)
    s.seen.append(s.net[0])
    s.call()


def _converted_again(s: Situation) -> None:
    index = s.draw.randrange(3)
    fst.fold(s.net[index : index + 1], inplace=True)
    fst.convert(s.net, "srste", include=str(index))
    s.seen += s.net
    s.call()


def _in_threads(s: Situation) -> None:
    threads = [threading.Thread(target=s.call) for _ in range(s.draw.randint(2, 4))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def _nested(s: Situation) -> None:
    with fst.frozen(s.net[0]):
        raise AssertionError("a block within a block was allowed")


def _stepped(s: Situation) -> None:
    optimizer = torch.optim.SGD(s.net.parameters(), lr=0.1)
    s.call().sum().backward()
    optimizer.step()
    raise AssertionError("a step within the block was allowed")


def _recomputed(s: Situation) -> None:
    images = torch.randn(2, 4, 6, 6, requires_grad=True)
    checkpoint(s.net, images, use_reentrant=s.draw.random() < 0.5).sum().backward()


EXITS: dict[str, Exit] = {
    "end": lambda s: None,
    "error": partial(_raised, ValueError("campaign")),
    "interrupt": partial(_raised, KeyboardInterrupt()),
    "stop": partial(_raised, Stopped()),
    "threads": _in_threads,
    "nested": _nested,
    "stepped": _stepped,
    "folded-part": lambda s: fst.fold(s.net[:2], inplace=True),
    "folded-whole": lambda s: fst.fold(s.net, inplace=True),
    "folded-copy": lambda s: s.call(fst.fold(s.net)),
    "removed": lambda s: s.net.__delitem__(s.draw.randrange(3)),
    "replaced": _replaced,
    "converted-again": _converted_again,
    "deepcopied": partial(_copied, copy.deepcopy),
    "pickled": partial(_copied, lambda net: pickle.loads(pickle.dumps(net))),
    "checkpointed": _recomputed,
    "loaded": lambda s: (s.net.load_state_dict(s.net.state_dict()), s.call()),
    "to-double": lambda s: s.net.double(),
    "half-of-the-net": lambda s: s.call(s.net[:1]),
}


def checks() -> Checks:
    """Each way out of a block."""
    return [(name, 12, partial(_check, leave)) for name, leave in EXITS.items()]


def _check(leave: Exit, draw: random.Random) -> None:
    s = Situation(draw)
    _check_within(s)
    s.net.train(draw.random() < 0.5)
    expected = (ValueError, UsageError, Stopped, KeyboardInterrupt)
    with contextlib.suppress(*expected), fst.frozen(s.net):
        s.call()
        leave(s)
    for layer in s.seen:
        if isinstance(layer, SparseLayer):
            _check_free(layer.float(), s.strategy)


def _check_within(s: Situation) -> None:
    """Outputs in the block are those outside, bit for bit, in any mode."""
    images = torch.randn(2, 4, 6, 6)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=s.draw.random() < 0.3)
    context = s.draw.choice((contextlib.nullcontext, torch.no_grad, torch.inference_mode))
    s.net.eval()
    with autocast, context():
        outside = s.net(images)
        with fst.frozen(s.net):
            within = [s.net(images) for _ in range(2)]
    assert all(torch.equal(outside, output) for output in within), f"another output: {s.strategy}"


def _check_free(layer: SparseLayer, strategy: str) -> None:
    assert layer.transient.frozen is None, f"{strategy}: a layer is left frozen"
    layer.eval()
    images = torch.randn(2, layer.in_channels, 5, 5)
    with torch.no_grad():
        before = layer(images)
        layer.weight.mul_(-3)
        after, expected = layer(images), copy.deepcopy(layer)(images)
    assert torch.equal(after, expected), f"{strategy}: the output is the old weight's"
    assert not torch.equal(after, before), f"{strategy}: the output has not changed"
