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
from torch.nn.utils import prune

import fst
from fst.inference.packed import packed_layers
from fst.ops.cpp import missing
from tests.campaign.shared import Checks
from tests.cases import random_layout
from tests.inference.test_changes import WATCHERS

TOLERANCE = {None: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Identity)
Change = Callable[[random.Random, nn.Module], object]


def checks() -> Checks:
    """Sizes, dtypes, changes, watchers, NaN, compilers."""
    if missing():
        return []
    return [
        ("sizes", 80, _check_sizes),
        ("dtypes", 30, _check_dtypes),
        ("nan", 40, _check_nan),
        *((f"changed-{name}", 8, partial(_check_change, name)) for name in CHANGES),
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
    packed = fst.pack(net, _images(draw, net).to(net.shift.dtype), dtype=dtype)
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


def _layer(draw: random.Random, net: nn.Module) -> nn.Module:
    found = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return draw.choice(found)


def _norm(draw: random.Random, net: nn.Module) -> nn.Module:
    found = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    return draw.choice(found) if found else nn.BatchNorm2d(4)


def _doubled(module: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


def _replace(draw: random.Random, net: nn.Module) -> None:
    stage = draw.choice(list(net.stages))
    stage[len(stage) - 1] = draw.choice(ACTIVATIONS)()


def _hook(draw: random.Random, net: nn.Module) -> None:
    draw.choice(list(net.modules())).register_forward_hook(_doubled)


CHANGES: dict[str, Change] = {
    "in-place": lambda draw, net: _layer(draw, net).weight.mul_(1.5),
    "inference-mode": lambda draw, net: torch.inference_mode()(_layer(draw, net).weight.mul_)(2),
    "data": lambda draw, net: setattr(
        (layer := _layer(draw, net)).weight, "data", layer.weight.data * 2
    ),
    "parameter": lambda draw, net: setattr(
        (layer := _layer(draw, net)), "weight", nn.Parameter(layer.weight * 2, requires_grad=False)
    ),
    "no-bias": lambda draw, net: setattr(_layer(draw, net), "bias", None),
    "statistics": lambda draw, net: _norm(draw, net).running_var.mul_(2),
    "norm-weight": lambda draw, net: _norm(draw, net).weight.add_(1),
    "eps": lambda draw, net: setattr(_norm(draw, net), "eps", 0.1),
    "norm-trains": lambda draw, net: _norm(draw, net).train(),
    "scale": lambda draw, net: setattr(net, "scale", 3.0),
    "sums": lambda draw, net: net.adds.__setitem__(0, "before"),
    "activation": _replace,
    "hook": _hook,
    "pruned": lambda draw, net: prune.l1_unstructured(_layer(draw, net), "weight", 0.5),
    "loaded": lambda draw, net: net.load_state_dict(
        {n: v * 1.5 for n, v in net.state_dict().items()}, assign=draw.random() < 0.5
    ),
}


@torch.no_grad()
def _check_change(name: str, draw: random.Random) -> None:
    """Twice the same change in both, and calls in between."""
    net = _model(draw)
    packed = _packed(draw, net)
    images = _images(draw, net)
    for _ in range(2):
        state = draw.getstate()
        for one in (net, packed):
            draw.setstate(state)
            CHANGES[name](draw, one)
        for _ in range(2):
            _compare(packed(images), net(images))
        images = _images(draw, net)


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
    compiled = torch.compile(packed, fullgraph=True, backend="eager", dynamic=dynamic)
    _compare(compiled(images), net(images))
    _compare(torch.export.export(packed, (images,)).module()(images), net(images))
    other = _images(draw, net)
    _compare(compiled(other), net(other))
