"""Compiled models train as they do without torch.compile, in each of its modes."""

from __future__ import annotations

import copy
import random

import torch
from torch import nn

import fst
from tests.campaign.shared import Checks
from tests.cases import error

STRATEGIES = ("dense", "srste", "fst", "fst_w", "sdgp", "wg", "gx", "gg", "meprop", "sparsetrain")
TOLERANCE = 1e-4


def checks() -> Checks:
    """Two layers and more: one graph or several, sizes that are known, guessed or symbols."""
    return [("trained", 20, _check)]


def _model(draw: random.Random) -> nn.Sequential:
    width, layers = draw.choice((8, 16)), []
    for _ in range(draw.randint(2, 3)):
        kernel, bias = draw.choice((1, 3)), draw.random() < 0.5
        layers += [
            nn.Conv2d(width, width, kernel, draw.choice((1, 1, 2)), kernel // 2, bias=bias),
            draw.choice((nn.Identity, nn.ReLU, nn.Tanh))(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))


def _check(draw: random.Random) -> None:
    torch.manual_seed(draw.getrandbits(32))
    plain = _model(draw)
    fst.convert(plain, draw.choice(STRATEGIES), layers=draw.choice(("conv", "all")))
    twin = copy.deepcopy(plain)
    mode = {
        "dynamic": draw.choice((None, True, False)),
        "fullgraph": draw.random() < 0.5,
        "backend": draw.choice(("eager", "aot_eager")),
    }
    torch._dynamo.reset()
    compiled = torch.compile(twin, **mode)
    for _ in range(2):
        size = draw.choice((1, 2, 5)), plain[0].in_channels, draw.randint(8, 13), 9
        images, found = torch.randn(size), []
        for net, called in ((plain, plain), (twin, compiled)):
            net.zero_grad()
            output = called(images)
            output.square().sum().backward()
            found.append([output.detach(), *(p.grad for p in net.parameters())])
        off = max(error(a, b) for b, a in zip(*found, strict=True))
        assert off <= TOLERANCE, f"{off:.1e} off: {mode}, {plain}"
