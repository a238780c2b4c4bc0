"""Depthwise layers of packed models and the 1x1 layers around them, computed in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fst
from fst.basics.errors import UsageError
from fst.inference.packed import PackedLayer
from fst.ops.backends.depthwise import PreparedDepthwise
from fst.ops.cpp import missing
from tests.inference.ranks import BY_ZEROS, rank
from tests.networks import Inverted, keep, relative

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing"),
    pytest.mark.usefixtures("without_gradients"),
]

CHANNELS = Inverted.channels


def depthwise() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)


def pointwise() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 1)


def made(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return keep(model)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("parts", ["abc", "ab", "bc", "b"])
def test_blocks(parts: str, stride: int, by_zeros: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Inverted(8, parts, stride))
    channels = 8 if "a" in parts else CHANNELS
    packed = fst.pack(model, torch.randn(2, channels, 9, 9))
    report = packed.report
    (row,) = report.chains if len(parts) > 1 else report.layers
    name = row.name.removesuffix(".weight")
    assert name.count(" + ") == len(parts) - 1 and name in str(report) and report.gained
    assert row.decision.backend == "depthwise"
    inputs = [torch.randn(size) for size in ((1, channels, 14, 5), (5, channels, 1, 1))]
    for x in inputs:
        packed(x)
    if len(parts) > 1:
        monkeypatch.setattr(PackedLayer, "multiply", None)  # no size is timed again
    for x in inputs:
        assert relative(packed(x), model(x)) < 1e-5


@pytest.mark.parametrize("kinds", ["dpdp", "pdpdp", "ddpdd", "pdpp", "dp"])
def test_a_layer_belongs_to_one_chain(kinds: str, by_zeros: None) -> None:
    layers = [depthwise() if kind == "d" else pointwise() for kind in kinds]
    model, x = made(nn.Sequential(*layers)), torch.randn(2, CHANNELS, 9, 9)
    packed = fst.pack(model, x)
    chained = [name for row in packed.report.chains for name in row.name.split(" + ")]
    assert len(chained) == len(set(chained))
    assert relative(packed(x), model(x)) < 1e-5


class Added(nn.Module):
    """A depthwise layer to which its input is added."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


@pytest.mark.parametrize("kinds", ["d", "pd", "dp", "pdp"])
def test_residuals(kinds: str, by_zeros: None) -> None:
    layers = [depthwise() if kind == "d" else pointwise() for kind in kinds]
    model, x = made(Added(*layers)), torch.randn(2, CHANNELS, 9, 9)
    packed = fst.pack(model, x)
    runs = [row.decision.backend for row in packed.report.chains]
    assert runs == (["depthwise"] if kinds.endswith("p") else [])
    assert relative(packed(x), model(x)) < 1e-5


def test_weights_that_are_not_contiguous(by_zeros: None) -> None:
    model = made(nn.Sequential(pointwise(), depthwise(), pointwise()))
    for place in (0, 2):
        weight = model[place].weight.detach().transpose(0, 1)
        model[place].weight = nn.Parameter(weight)
    x = torch.randn(2, CHANNELS, 9, 9)
    packed = fst.pack(model, x)
    assert packed.report.chains[0].decision.backend == "depthwise"
    model[0].bias = nn.Parameter(torch.randn(2 * CHANNELS)[::2])
    packed.load_state_dict(model.state_dict(), assign=True)
    packed.requires_grad_(False)
    assert relative(packed(x), model(x)) < 1e-5


class Shared(nn.Module):
    """Parts that are traced apart, and share a layer."""

    def __init__(self) -> None:
        super().__init__()
        shared = pointwise()
        self.p = nn.Sequential(depthwise(), shared, nn.ReLU())
        self.q = nn.Sequential(depthwise(), shared)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.p(x) + self.q(x * 2)


def test_a_layer_that_two_parts_share(by_zeros: None) -> None:
    model, x = made(Shared()), torch.randn(2, CHANNELS, 9, 9)
    assert relative(fst.pack(model, x)(x), model(x)) < 1e-5


def test_one_by_one_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    rank(monkeypatch, {**BY_ZEROS, "unfused": 1.0, "depthwise": 10.0})
    model, x = made(Inverted()), torch.randn(2, 8, 9, 9)
    packed = fst.pack(model, x)
    monkeypatch.setattr(PreparedDepthwise, "__call__", None)
    assert packed.report.chains[0].decision.backend == "unfused"
    assert relative(packed(x), model(x)) < 1e-5


@pytest.mark.parametrize("slow", ["layers", "packed"])
def test_nothing_gained(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"dense": 1.0, "zeros_pixels": 2.0, "zeros_images": 2.0}
    chain = {"unfused": 1.0, "depthwise": 2.0 if slow == "layers" else 0.5}
    whole = {"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 8.5}
    rank(monkeypatch, {**ranks, **chain, **whole})
    model, x = made(Inverted()), torch.randn(2, 8, 9, 9)
    packed = fst.pack(model, x)
    assert not packed.report.gained and packed.report.chains[0].decision.backend == "unfused"
    monkeypatch.setattr(PreparedDepthwise, "__call__", None)
    assert relative(packed(x), model(x)) < 1e-5


def test_export_computes_the_layers_one_by_one(by_zeros: None) -> None:
    model, x = made(Inverted()), torch.randn(2, 8, 9, 9)
    packed = fst.pack(model, x)
    assert relative(torch.export.export(packed, (x,)).module()(x), model(x)) < 1e-5


def test_parts_that_are_called_alone_are_the_plain_ones(by_zeros: None) -> None:
    model, x = made(Inverted()), torch.randn(2, 8, 9, 9)
    packed = fst.pack(model, x)
    for layer, plain in zip(packed.layers, model.layers, strict=True):
        x = plain(given := x)
        if isinstance(plain, nn.Conv2d):
            assert relative(layer(given), x) < 1e-5


def test_training_is_refused_by_name(by_zeros: None) -> None:
    packed, x = fst.pack(made(Inverted()), torch.randn(2, 8, 9, 9)), torch.randn(2, 8, 9, 9)
    packed.layers[0].train()
    with pytest.raises(UsageError, match=r"layer 'layers.0' is packed.* is in training mode"):
        packed(x)
    packed.eval().layers[3].weight.requires_grad_(True)
    with torch.enable_grad(), pytest.raises(UsageError, match=r"'layers.3' .* for a gradient"):
        packed(x)


class Hostile(nn.Module):
    """Maps that others see, or change in place, between layers that follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.again, self.third = (nn.Conv2d(8, CHANNELS, 1) for _ in range(3))
        self.a, self.b, self.c, self.d = (depthwise() for _ in range(4))
        self.project, self.relu = nn.Conv2d(CHANNELS, 8, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.expand(x)
        y = self.a(seen) * seen  # `seen` is used again
        z = self.again(x)
        x = self.relu(x)  # changes the input of `again` before `b`
        z = self.b(z)
        x = x * 1
        w, part = self.third(x), x[:, :4]
        part.relu_()  # changes a part of the input of `third` before `c`
        w = self.c(w)
        torch.add(x, 1, out=x)
        v = self.d(w) + self.d(w)  # a layer that is called twice
        last = self.project(z)
        return last * self.project(v + y) + x


def test_nothing_is_chained_that_others_see(by_zeros: None) -> None:
    model, x = made(Hostile()), torch.randn(2, 8, 6, 6)
    expected = model(x.clone())
    packed = fst.pack(model, x)
    assert not packed.report.chains
    assert relative(packed(x.clone()), expected) < 1e-5


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2, groups=CHANNELS)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum() * 0) + 2):
            x = self.act(self.conv(x))
        return x


def test_a_depthwise_layer_of_a_model_that_cannot_be_traced(by_zeros: None) -> None:
    model, x = made(Untraceable()), torch.randn(2, CHANNELS, 6, 6)
    x = x.to(memory_format=torch.channels_last)
    packed = fst.pack(model, x)
    assert packed.report.layers[0].decision.backend == "depthwise"
    assert relative(packed(x), model(x)) < 1e-5
