"""Packed models compute what the plain ones do: in other sizes, changed, traced, and with NaN."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import fst
from fst.inference.packed import packed_layers
from fst.ops.cpp import missing
from tests.campaign.shared import Checks
from tests.cases import random_layout
from tests.inference.test_changes import CHANGES, WATCHERS
from tests.networks import keep

TOLERANCE = {None: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Identity)


def checks() -> Checks:
    """Sizes, dtypes, changes, watchers, NaN, compilers."""
    if missing():
        return []
    return [
        ("sizes", 80, _check_sizes),
        ("dtypes", 30, _check_dtypes),
        ("nan", 40, _check_nan),
        *(
            (f"changed-{n.replace(' ', '-')}", 5, partial(_check_change, _layers, c))
            for n, c in CHANGES.items()
        ),
        *((f"changed-{n}", 8, partial(_check_change, _model, c)) for n, c in VALUES.items()),
        *((f"watched-{name}", 5, partial(_check_watched, name)) for name in WATCHERS),
        ("compiled", 12, _check_compiled),
    ]


class Net(nn.Module):
    """Convolutions, norms and activations in a random order, sums, and Python values."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_stage(draw, width) for _ in range(draw.randint(1, 4)))
        self.adds = [draw.choice(("", "", "before", "after", "onto", "view")) for _ in self.stages]
        self.head = nn.Linear(width, draw.choice((4, 16)))
        self.shift = nn.Parameter(torch.randn(draw.choice(((), (1,), (1, 1), (1, 1, 1)))))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for stage, adds in zip(self.stages, self.adds, strict=True):
            y = stage(x)
            if adds == "before":
                y = x + y
            elif adds == "after":
                y += x
            elif adds == "onto":
                x = x * 1
                y = x.add_(y)
            elif adds == "view":
                x = x * 1
                seen = x.flatten(1)
                x.add_(y)
                y = x * seen.mean()
            x = y
        return self.head(x.mean((2, 3)) * self.scale) + self.shift


def _stage(draw: random.Random, width: int) -> nn.Sequential:
    kind = draw.choice(("conv", "conv", "pointwise", "depthwise", "inverted", "grouped"))
    layers = {
        "conv": [nn.Conv2d(width, width, 3, padding=draw.choice((1, "same")))],
        "pointwise": [nn.Conv2d(width, width, 1, bias=draw.random() < 0.5)],
        "depthwise": [nn.Conv2d(width, width, 3, padding=1, groups=width)],
        "inverted": [
            *(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU6()),
            *(nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width), nn.ReLU()),
            nn.Conv2d(2 * width, width, 1),
        ],
        "grouped": [nn.Conv2d(width, width, 3, padding=2, dilation=2, groups=2)],
    }[kind]
    if draw.random() < 0.7:
        layers.append(nn.BatchNorm2d(width))
    if draw.random() < 0.2:
        layers.append(nn.Dropout())
    return nn.Sequential(*layers, draw.choice(ACTIVATIONS)())


def _model(draw: random.Random, density: float | None = None) -> Net:
    torch.manual_seed(draw.getrandbits(32))
    net = Net(draw, draw.choice((8, 16)))
    net.train()(torch.randn(8, net.head.in_features, 7, 7))  # statistics of batch norm
    density = draw.choice((0.3, 0.6, 1.0)) if density is None else density
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data *= torch.rand_like(module.weight) < density
    return net.eval().requires_grad_(False)


def _images(draw: random.Random, net: Net) -> Tensor:
    size = (draw.randint(1, 6), net.head.in_features, draw.randint(3, 12), draw.randint(3, 12))
    return random_layout(draw, torch.randn(size))


def _packed(draw: random.Random, net: Net, dtype: torch.dtype | None = None) -> nn.Module:
    """Packed on an example, by ways that were measured or drawn."""
    return _by_drawn_ways(draw, fst.pack(net, _images(draw, net), dtype=dtype))


def _by_drawn_ways(draw: random.Random, packed: nn.Module) -> nn.Module:
    if draw.random() < 0.8:
        for layer in packed_layers(packed).values():
            names = draw.choice((("dense",), ("zeros_images", "zeros_pixels"), ("zeros_pixels",)))
            layer.plans.only(*names)
    return packed


def _compare(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    assert found.shape == expected.shape, f"{tuple(found.shape)}, not {tuple(expected.shape)}"
    assert torch.equal(found.isnan(), expected.isnan()), "NaN is elsewhere"
    finite = expected.isfinite()
    off = float((found - expected)[finite].abs().max()) if finite.any() else 0.0
    size = float(expected[finite].abs().max()) if finite.any() else 1.0
    assert off <= TOLERANCE[dtype] * max(size, 1e-3), f"{off / max(size, 1e-3):.1e} off"


@torch.no_grad()
def _check_sizes(draw: random.Random) -> None:
    """Other sizes and memory formats, copies and pickles."""
    net = _model(draw)
    packed = _packed(draw, net)
    for _ in range(12):
        if draw.random() < 0.2:
            packed = draw.choice((copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))(packed)
        images = _images(draw, net)
        _compare(packed(images), net(images))


@torch.no_grad()
def _check_dtypes(draw: random.Random) -> None:
    net, dtype = _model(draw), draw.choice((torch.bfloat16, torch.float16))
    net.adds = [adds.replace("view", "") for adds in net.adds]  # whose means are not that exact
    packed = _packed(draw, net, dtype)
    for _ in range(3):
        images = _images(draw, net)
        found = packed(images.to(dtype))
        assert found.dtype == dtype, found.dtype
        _compare(found.float(), net(images), dtype)


@torch.no_grad()
def _check_nan(draw: random.Random) -> None:
    """NaN of the input, a weight, a bias or a statistic is where the plain model has it."""
    net = _model(draw, density=1.0)
    packed, images = _packed(draw, net), _images(draw, net)
    state = [value for value in net.state_dict().values() if value.is_floating_point()]
    values = draw.choice([images, *state])
    values[tuple(map(draw.randrange, values.shape))] = math.nan
    packed.load_state_dict(net.state_dict())
    _compare(packed(images), net(images))


VALUES: dict[str, Callable[[Net], object]] = {
    "scale": lambda net: setattr(net, "scale", 3.0),
    "sums": lambda net: net.adds.__setitem__(0, "before"),
}


def _layers(draw: random.Random) -> nn.Sequential:
    """Of the form that `CHANGES` know: a convolution, a norm, an activation, and so on."""
    torch.manual_seed(draw.getrandbits(32))
    kernel, act = draw.choice((1, 3, 5)), draw.choice(ACTIVATIONS)
    first = nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=draw.choice((1, 2, 8)))
    net = nn.Sequential(
        *(first, nn.BatchNorm2d(8), act(), nn.Dropout(), nn.Conv2d(8, 16, 1)),
        *(nn.BatchNorm2d(16), draw.choice(ACTIVATIONS)(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()),
    )
    return keep(net, draw.choice((1, 2, 4))).requires_grad_(False)


@torch.no_grad()
def _check_change(
    make: Callable[[random.Random], nn.Module],
    change: Callable[[nn.Module], object],
    draw: random.Random,
) -> None:
    """The same change in both, calls before and after it."""
    net = make(draw)
    channels = next(m.in_channels for m in net.modules() if isinstance(m, nn.Conv2d))

    def images() -> Tensor:
        size = draw.randint(1, 6), channels, draw.randint(6, 12), draw.randint(6, 12)
        return random_layout(draw, torch.randn(size))

    packed = _by_drawn_ways(draw, fst.pack(net, images()))
    _compare(packed(given := images()), net(given))
    for one in (net, packed):
        torch.manual_seed(0)
        change(one)
    dtype = next(net.parameters()).dtype
    for _ in range(2):
        given = images().to(dtype)
        _compare(packed(given), net(given))


@torch.no_grad()
def _check_watched(name: str, draw: random.Random) -> None:
    net = _model(draw)
    packed = _packed(draw, net)
    images = _images(draw, net)
    found, expected = (WATCHERS[name](one, images) for one in (packed, net))
    assert found.dtype == expected.dtype
    _compare(found.float(), expected.float(), torch.bfloat16 if name == "autocast" else None)
    _compare(packed(images), net(images))


@torch.no_grad()
def _check_compiled(draw: random.Random) -> None:
    """As one graph, in other sizes, after a change; and as an exported program."""
    net = _model(draw)
    packed = _packed(draw, net)
    for one in (net, packed):
        one.head.weight.mul_(1.5)
    dynamic, images = draw.choice((None, True, False)), _images(draw, net)
    torch.compiler.reset()  # of one function, few versions are kept
    compiled = torch.compile(packed, fullgraph=True, backend="eager", dynamic=dynamic)
    _compare(compiled(images), net(images))
    _compare(torch.export.export(packed, (images,)).module()(images), net(images))
    other = _images(draw, net)
    _compare(compiled(other), net(other))
