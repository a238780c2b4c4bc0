"""No exit from `fst.frozen` leaves a layer frozen, and within the block S(W) is the weight's."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.layers.modules import SparseLayer
from tests.campaign.weights import Checks

COUNT = 12  # of each exit, at scale 1
STRATEGIES = ("srste", "fst", "fst_w", "sdgp", "tsm", "gg", "mvue", "fst_sampled", "sste")


class Stopped(BaseException):
    """What no code but the campaign's own catches."""


class Failing(nn.Module):
    """A part that raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return input


class Situation:
    """A converted net with a part that can fail, in a block of `fst.frozen`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        torch.manual_seed(draw.getrandbits(32))
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            Failing(),
            nn.Conv2d(8, 8, draw.choice((1, 3)), padding=1, groups=draw.choice((1, 2))),
            nn.ReLU(),
            nn.Conv2d(8, 4, 1),
        )
        self.strategy = draw.choice(STRATEGIES)
        fst.convert(self.net, self.strategy)
        self.seen: list[nn.Module] = [*self.layers(self.net)]

    @staticmethod
    def layers(net: nn.Module) -> list[SparseLayer]:
        return [module for module in net.modules() if isinstance(module, SparseLayer)]

    def call(self, net: nn.Module | None = None) -> Tensor:
        return (net or self.net)(torch.randn(2, 4, 6, 6))

    def index(self) -> int:
        return self.draw.choice((0, 2, 4))


Exit = Callable[[Situation], object]


def _fail(error: Callable[[], BaseException], s: Situation) -> None:
    s.net[1].error = error()
    s.call()


def _copied(copied: Callable[[nn.Module], nn.Module], s: Situation) -> None:
    other = copied(s.net)
    s.seen += s.layers(other)
    s.call(other)


def _replaced(s: Situation) -> None:
    index = s.index()
    old = s.net[index]
    new = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, groups=old.groups)
    fst.convert(new, s.strategy)
    s.net[index] = new
    s.seen.append(new)
    s.call()


def _converted_again(s: Situation) -> None:
    index = s.index()
    fst.fold(s.net[index : index + 1], inplace=True)
    fst.convert(s.net, "srste", include=str(index))
    s.seen += s.layers(s.net)
    s.call()


def _in_threads(s: Situation) -> None:
    threads = [threading.Thread(target=s.call) for _ in range(s.draw.randint(2, 4))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def _generator(s: Situation) -> None:
    """A generator that nobody reads to its end, within the block of another model."""
    other = Situation(s.draw)
    s.seen += other.seen

    def batches() -> Iterator[Tensor]:
        with fst.frozen(other.net):
            while True:
                yield other.call()

    read = batches()
    next(read)
    if s.draw.random() < 0.5:
        read.close()
    else:
        del read


def _nested(s: Situation) -> None:
    with fst.frozen(s.net[s.index()]):
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
    "error": partial(_fail, lambda: ValueError("campaign")),
    "interrupt": partial(_fail, KeyboardInterrupt),
    "stop": partial(_fail, Stopped),
    "generator": _generator,
    "threads": _in_threads,
    "nested": _nested,
    "stepped": _stepped,
    "folded-part": lambda s: fst.fold(s.net[: s.draw.choice((1, 3))], inplace=True),
    "folded-whole": lambda s: fst.fold(s.net, inplace=True),
    "folded-copy": lambda s: s.call(fst.fold(s.net)),
    "removed": lambda s: s.net.__delitem__(s.index()),
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
    return [(name, COUNT, partial(_check, leave)) for name, leave in EXITS.items()]


def _check(leave: Exit, draw: random.Random) -> None:
    s = Situation(draw)
    s.net.train(draw.random() < 0.5)
    _check_within(s)
    with contextlib.suppress(ValueError, AttributeError, fst.basics.errors.UsageError, Stopped):
        with contextlib.suppress(KeyboardInterrupt), fst.frozen(s.net):
            s.call()
            leave(s)
    s.net.float()
    for module in s.net:
        if isinstance(module, Failing):
            module.error = None
    for layer in [*s.seen, *s.layers(s.net)]:
        if isinstance(layer, SparseLayer):
            _check_free(layer.float(), s.strategy)


def _check_within(s: Situation) -> None:
    """Outputs and gradients in the block are those outside, bit for bit, in any mode."""
    images = torch.randn(2, 4, 6, 6)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=s.draw.random() < 0.3)
    context = s.draw.choice((contextlib.nullcontext, torch.no_grad, torch.inference_mode))
    was = s.net.training
    s.net.eval()
    with autocast, context():
        outside = s.net(images)
        with fst.frozen(s.net):
            within = [s.net(images) for _ in range(2)]
    s.net.train(was)
    assert all(torch.equal(outside, output) for output in within), f"another output: {s.strategy}"


def _check_free(layer: SparseLayer, strategy: str) -> None:
    assert layer.passing.frozen is None, f"{strategy}: a layer is left frozen"
    layer.eval()
    images = torch.randn(2, layer.in_channels, 5, 5)
    with torch.no_grad():
        before = layer(images)
        if layer.state.kept_mask is None:
            layer.weight.copy_(torch.randn_like(layer.weight))
        else:
            layer.weight.mul_(-3)
        after, expected = layer(images), copy.deepcopy(layer)(images)
    assert torch.equal(after, expected), f"{strategy}: the output is the old weight's"
    assert not torch.equal(after, before), f"{strategy}: the output has not changed"
