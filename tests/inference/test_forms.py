"""`fst.pack` of models with code of their own: methods, branches, views, shared layers, writes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fst
from fst.ops.cpp import missing
from tests.networks import Block, keep, relative

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing"),
    pytest.mark.usefixtures("without_gradients"),
]


class Features(nn.Module):
    """A network with a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Hardswish()

    def features(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))


def test_other_methods_compute_what_they_did(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Features()), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    assert packed.report.layers[0].follows == ("batch norm", "hardswish")
    assert isinstance(packed, Features)
    for one in (packed, copy.deepcopy(packed)):
        assert relative(one(x=x), model(x)) < 1e-5
        assert relative(one.features(x), model.features(x)) < 1e-5


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.width = Block(), nn.Conv2d(8, 4, 1), 8
        self.body.out_channels = 8

    def forward(self, x: Tensor, sizes: list[int] | None = None) -> dict[str, Tensor]:
        for _ in range(int(x.sum() * 0) + 2):
            x = self.body(x)
        return {"out": self.head(x)[:, : self.body.out_channels // 4]}


def test_a_model_that_cannot_be_traced_is_packed_in_parts(by_zeros: None) -> None:
    torch.manual_seed(0)
    model = keep(Untraceable())
    packed = fst.pack(model, torch.randn(1, 8, 9, 9))
    x = torch.randn(3, 8, 7, 9)
    assert type(packed) is Untraceable
    assert relative(packed(x)["out"], model(x)["out"]) < 1e-5
    rows = {row.layer: row for row in packed.report.layers}
    assert rows["body.conv2"].follows == ("batch norm", "residual", "relu")
    assert rows["head"].decision.backend == "zeros_pixels"
    assert torch.equal(pickle.loads(pickle.dumps(packed))(x)["out"], packed(x)["out"])


class Viewed(nn.Module):
    """Code that needs contiguous maps: within a trace, and around a part that is traced."""

    def __init__(self, is_traced: bool) -> None:
        super().__init__()
        self.body, self.head, self.is_traced = Block(), nn.Linear(8 * 36, 5), is_traced

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.is_traced or bool((x == x).all()):
            x = x.view(x.size(0), -1)
        return self.head(x)


@pytest.mark.parametrize("is_traced", [True, False])
def test_views_of_maps(is_traced: bool, by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Viewed(is_traced)), torch.randn(2, 8, 6, 6)
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    assert "batch norm" in packed.report.layers[0].follows


def test_results_have_the_memory_format_of_the_images(by_zeros: None) -> None:
    x = torch.randn(2, 8, 6, 6)
    packed = fst.pack(keep(Block()), x)
    assert packed(x).is_contiguous()
    assert packed(x.contiguous(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )


class Keeping(nn.Module):
    """Keeps what it computes, or what it needs for the size of its input."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.what, self.seen, self.features, self.grid = what, [], None, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.what == "features":
            self.features = x
        elif self.what == "list":
            self.seen.append(x)
        elif self.grid is None or self.grid.shape[-1] != x.shape[-1]:
            self.grid = torch.linspace(0, 1, x.shape[-1])
        return self.b(x + self.grid if self.what == "grid" else x)


@pytest.mark.parametrize("what", ["features", "list", "grid"])
def test_a_model_that_keeps_what_it_computes(what: str, by_zeros: None) -> None:
    torch.manual_seed(0)
    model = keep(Keeping(what))
    packed = pickle.loads(pickle.dumps(fst.pack(model, torch.randn(2, 8, 6, 6))))
    x = torch.randn(2, 8, 7, 7)
    assert relative(packed(x), model(x)) < 1e-5
    if what == "features":
        assert relative(packed.features, model.features) < 1e-5
    if what == "list":
        assert relative(packed.seen[-1], model.seen[-1]) < 1e-5


class Buffered(nn.Module):
    """Something is made of a buffer, and a method needs the layers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.full((4,), 0.5))

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.conv((x - self.mean.view(1, -1, 1, 1)).to(self.mean.dtype))).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.to(self.head.weight.dtype)).mean((2, 3)))


def test_buffers_are_loaded(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Buffered()), torch.randn(2, 4, 9, 9)
    packed, other = fst.pack(model, x), keep(Buffered())
    other.mean.fill_(3.0)
    packed.load_state_dict(other.state_dict())
    assert relative(packed(x), other(x)) < 1e-5


def test_everything_computes_in_the_dtype(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Buffered()), torch.randn(2, 4, 9, 9)
    for dtype in (torch.bfloat16, torch.float16):
        packed = fst.pack(model, x, dtype=dtype)
        found, features = packed(x.to(dtype)), packed.features(x.to(dtype))
        assert found.dtype == features.dtype == dtype
        assert relative(found.float(), model(x)) < 0.05
        assert relative(features.float(), model.features(x)) < 0.05
    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    packed = fst.pack(encoder, x, dtype=torch.bfloat16)
    assert relative(packed(x.bfloat16()).float(), encoder(x)) < 0.05


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None = None, features: bool = False) -> Tensor:
        x = self.conv(x).relu()
        x = x if mask is None else x * mask
        return x if features is True else x.mean((2, 3))


class NotSelf(Branching):
    def forward(module, x: Tensor) -> Tensor:
        return Branching.forward(module, x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Branching()

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            return x
        return self.body(self.body(x, features=True), x)


def test_calls_of_another_form_than_the_example(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x, mask = keep(Branching()), torch.randn(2, 8, 6, 6), torch.rand(2, 1, 6, 6)
    for example in ((x,), (x, mask)):
        packed = pickle.loads(pickle.dumps(fst.pack(model, example)))
        for given in ((x,), (x, mask), (x, None, True), (x, mask, True)):
            assert relative(packed(*given), model(*given)) < 1e-5
        assert relative(packed(features=True, x=x), model(x, features=True)) < 1e-5
    for model in (keep(Twice()), keep(NotSelf())):
        assert relative(fst.pack(model, x)(x), model(x)) < 1e-5


class Heads(nn.Module):
    """Parts that share a layer, with another activation behind it in each."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Conv2d(8, 8, 3, padding=1)
        self.a = nn.Sequential(shared, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.b = nn.Sequential(shared, nn.SiLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.isfinite().all():
            return x, x
        return self.a(x), self.b(x)


def test_parts_that_share_a_layer(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Heads()), torch.randn(2, 8, 6, 6)
    packed = fst.pack(model, x)
    for found, expected in zip(packed(x), model(x), strict=True):
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("follower", [nn.ReLU, nn.Identity])
def test_a_pre_hook_of_a_follower_is_called(follower: type[nn.Module], by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(nn.Sequential(nn.Conv2d(8, 8, 3), follower())), torch.randn(2, 8, 6, 6)
    model[1].register_forward_pre_hook(lambda _, given: (given[0] - 1,))
    assert relative(fst.pack(model, x)(x), model(x)) < 1e-5


class Written(nn.Module):
    """Writes to a layer's input through a view, between the layer and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = self.c(x)
        view, y = a[:, :4], self.d(a)
        view.mul_(3.0)
        return y + a


def test_a_view_that_is_written_is_seen(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Written()), torch.randn(2, 8, 6, 6)
    assert relative(fst.pack(model, x)(x), model(x)) < 1e-5


class Hostile(nn.Module):
    """Values that are used twice, or changed in place between a product and its addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.norm(y)  # y is used again
        y = y + 1
        u = self.b(y)
        w = self.relu(y)  # changes the input of b before its addition
        u = w + u
        z += self.c(u)  # z is used after the addition
        return F.relu(z) * self.c(z) + 2 * u


def test_nothing_is_fused_that_others_see(by_zeros: None) -> None:
    torch.manual_seed(0)
    model, x = keep(Hostile()), torch.randn(2, 8, 6, 6)
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    assert not any(row.follows for row in packed.report.layers)
