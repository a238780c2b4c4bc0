from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import fst
from fst.api.pack_report import NOTHING_GAINED
from fst.basics.errors import UsageError
from fst.layers import sizes
from fst.layers.packed import LIBRARY, PackedLayer, pack_layer
from fst.ops.cpp.library import missing
from fst.ops.cpp.zeros_weight import ACTIVATIONS, PreparedOutput
from tests.networks import Block, keep, relative
from tests.ranks import BY_ZEROS, rank

pytestmark = pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")


def small() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), Block(), nn.Dropout()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 5)),
    )
    return keep(net)


@pytest.fixture
def by_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by zeros are the fastest."""
    rank(monkeypatch, BY_ZEROS)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenet_v2",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("resnet50", "vgg16_bn")),
    ],
)
def test_networks_of_torchvision(name: str, by_zeros: None) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    if name == "vgg16_bn":  # its linear layers alone take a minute
        model = keep(models.vgg.make_layers(models.vgg.cfgs["D"], batch_norm=True))
    else:
        model = keep(models.get_model(name, num_classes=10))
    packed = fst.pack(model, torch.randn(1, 3, 64, 64))
    assert packed.report.gained and packed.report.difference < 1e-4
    for shape in ((5, 3, 64, 64), (2, 3, 96, 64)):
        x = torch.randn(shape)
        assert relative(packed(x), model(x)) < 1e-4
    rows = {row.name: row for row in packed.report.layers}
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert all("batch norm" in rows[name].follows for name in convolutions)


@pytest.mark.system
@pytest.mark.exhaustive
def test_vgg16_with_its_linear_layers(by_zeros: None) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = keep(models.vgg16())
    packed = fst.pack(model, torch.randn(1, 3, 224, 224))
    assert packed.report.difference < 1e-4
    assert packed.report.layers[-1].runs == "zeros, over pixels"


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "mobilenetv3_small_050"])
def test_networks_of_timm(name: str, by_zeros: None) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = keep(timm.create_model(name, num_classes=10))
    packed = fst.pack(model, torch.randn(1, 3, 64, 64))
    x = torch.randn(3, 3, 64, 64)
    assert relative(packed(x), model(x)) < 1e-4
    follows = [row.follows for row in packed.report.layers]
    assert sum("batch norm" in f for f in follows) == sum(
        isinstance(module, nn.BatchNorm2d) for module in model.modules()
    )
    assert any(set(f) & {"relu", "silu", "hardswish"} for f in follows)


def test_a_vision_transformer(by_zeros: None) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = keep(timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=4))
    packed = fst.pack(model, torch.randn(2, 3, 32, 32))
    x = torch.randn(3, 3, 32, 32)
    assert relative(packed(x), model(x)) < 1e-4
    runs = {row.name: row.runs for row in packed.report.layers}
    assert runs["blocks.0.mlp.fc1"] == "zeros, over pixels"


def test_what_follows_a_layer_becomes_part_of_it(by_zeros: None) -> None:
    model = small()
    packed = fst.pack(model, torch.randn(2, 4, 9, 9))
    assert {row.name: row.follows for row in packed.report.layers} == {
        "0": ("batch norm", "silu"),
        "3.conv1": ("batch norm", "relu"),
        "3.conv2": ("batch norm", "residual", "relu"),
        "7": ("relu",),
        "9": (),
    }
    assert {row.density for row in packed.report.layers} == {0.5}


def test_the_example_is_left_alone(by_zeros: None) -> None:
    model, x = small(), torch.randn(2, 4, 9, 9)
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    fst.pack(model, x)(x)
    assert torch.equal(x, given)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(isinstance(module, PackedLayer) for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_zeros_of_any_pattern(by_zeros: None) -> None:
    model = small()
    prune.random_unstructured(model[3].conv1, "weight", 0.7)
    x = torch.randn(2, 4, 9, 9)
    reasons = {row.name: row.reason for row in fst.pack(model, x).report.layers}
    assert "parametrization" in reasons["3.conv1"] or "computed" in reasons["3.conv1"]
    prune.remove(model[3].conv1, "weight")
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    (row,) = [row for row in packed.report.layers if row.name == "3.conv1"]
    assert row.density < 0.5 and row.runs == "zeros, over pixels"


def test_a_converted_model_is_folded(by_zeros: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    fst.convert(model, "srste")
    x = torch.randn(2, 8, 6, 6)
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    assert packed.report.layers[0].density == 0.5


def test_the_report_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"library": 3.0, "zeros, over images": 2.0, "zeros, over pixels": 5.0}
    whole = {"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 4.0}
    rank(monkeypatch, {**ranks, **whole})
    packed = fst.pack(small(), torch.randn(4, 4, 9, 9))
    rows = {row.name: row for row in packed.report.layers}
    assert rows["0"].runs == "zeros, over images" and rows["9"].runs == "library"
    assert (rows["0"].library.median, rows["0"].zeros.median) == (3.0, 2.0)
    layers = {name: layer for name, layer in packed.named_modules() if name in rows}
    assert {layer.chosen[key] for layer in layers.values() for key in layer.chosen} == {0, 1}
    calls: list[str] = []
    multiply = PreparedOutput.__call__
    monkeypatch.setattr(
        PreparedOutput, "__call__", lambda *given: calls.append("zeros") or multiply(*given)
    )
    packed(torch.randn(4, 4, 9, 9))
    assert len(calls) == sum(row.runs != "library" for row in rows.values())
    assert NOTHING_GAINED not in str(packed.report)


@pytest.mark.parametrize("activation", ["", "relu", "relu6", "silu", "hardswish"])
@pytest.mark.parametrize("residual", ["none", "same", "contiguous", "broadcast", "double"])
def test_both_products_finish_alike(activation: str, residual: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3).eval()
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    given = {
        "none": None,
        "same": torch.randn(2, 8, 7, 7).to(memory_format=torch.channels_last),
        "contiguous": torch.randn(2, 8, 7, 7),
        "broadcast": torch.randn(8, 1, 1),
        "double": torch.randn(2, 8, 7, 7).double(),
    }[residual]
    expected = layer(x) if given is None else layer(x) + given
    if activation:
        expected = getattr(F, activation)(expected)
    packed = pack_layer(layer, "layer")
    packed.activation = ACTIVATIONS.index(activation)
    product = packed._product(x, 2)
    for found in (packed._by_library(x, given), packed._by_zeros(x, given, product)):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Scalars(nn.Module):
    """Adds a size and a parameter of no dimension to its layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.conv(x) + x.size(0)).mean((2, 3))) + self.shift


def test_a_residual_of_no_dimension(by_zeros: None) -> None:
    model = keep(Scalars())
    x = torch.randn(4, 8, 9, 9)
    packed = fst.pack(model, x)
    assert [row.follows for row in packed.report.layers] == [("residual",), ("residual",)]
    assert relative(packed(x), model(x)) < 1e-5


@pytest.mark.parametrize("slow", ["layers", "whole"])
def test_nothing_gained(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    zeros = 9.0 if slow == "layers" else 1.0
    ranks = {"library": 3.0, "zeros, over images": zeros, "zeros, over pixels": zeros}
    whole = {"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 8.5}
    rank(monkeypatch, {**ranks, **whole})
    model, x = small(), torch.randn(4, 4, 9, 9)
    packed = fst.pack(model, x)
    assert not packed.report.gained and NOTHING_GAINED in str(packed.report)
    monkeypatch.setattr(PreparedOutput, "__call__", None)
    assert relative(packed(x), model(x)) < 1e-5


def test_a_size_is_timed_once_and_few_are(monkeypatch: pytest.MonkeyPatch, by_zeros: None) -> None:
    model = keep(nn.Sequential(nn.Conv2d(8, 8, 3)))
    packed = fst.pack(model, torch.randn(1, 8, 5, 5))
    for batch in (*range(1, 14), *range(1, 14)):
        x = torch.randn(batch, 8, 5, 5)
        assert relative(packed(x), model(x)) < 1e-5
    layer = packed.get_submodule("0")
    assert len(layer.times) == len(layer.products) == sizes.MOST_TIMED
    assert len(layer.chosen) == 13 and LIBRARY not in layer.chosen.values()


def test_channels_last_and_other_strides(by_zeros: None) -> None:
    model = small()
    packed = fst.pack(model, torch.randn(2, 4, 9, 9))
    wide = torch.randn(4, 8, 9, 9)
    for x in (wide[:, :4], wide[:, ::2], wide.to(memory_format=torch.channels_last)[:, :4]):
        assert relative(packed(x), model(x)) < 1e-5
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    assert relative(packed(x), model(x)) < 1e-5


def test_the_state_is_the_plain_models(by_zeros: None) -> None:
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    plain = model.state_dict()
    assert list(packed.state_dict()) == list(plain)
    assert all(torch.equal(v, plain[k]) for k, v in packed.state_dict().items())
    torch.manual_seed(1)
    for p in model.parameters():
        p.mul_(1 + torch.rand_like(p))
    model[1].running_mean.add_(0.5)
    packed.load_state_dict(model.state_dict())
    assert relative(packed(x), model(x)) < 1e-5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(by_zeros: None, copied: object) -> None:
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    twin = copied(packed)
    assert torch.equal(twin(x), packed(x)) and twin.report == packed.report
    for value in twin.state_dict().values():
        value.zero_()
    twin.load_state_dict(twin.state_dict())
    assert not torch.equal(twin(x), packed(x))
    assert relative(packed(x), model(x)) < 1e-5


def test_the_library_with_new_weights_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's layout of a weight serves other sizes, and is made again of another weight."""
    ranks = {"library": 1.0, "zeros, over images": 2.0, "zeros, over pixels": 2.0}
    rank(monkeypatch, {**ranks, "plain": 9.0, "dense, batch norm folded": 8.0, "packed": 8.0})
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    for shape in ((1, 4, 9, 9), (5, 4, 17, 11), (0, 4, 9, 9)):
        given = torch.randn(shape)
        torch.testing.assert_close(packed(given), model(given))
    model[0].weight.mul_(2)
    packed.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert relative(packed(x), model(x)) < 1e-5
    twin = pickle.loads(pickle.dumps(copy.deepcopy(packed)))
    assert torch.equal(twin(x), packed(x))


def test_threads_and_inference_mode(by_zeros: None) -> None:
    model = small()
    packed = fst.pack(model, torch.randn(2, 4, 9, 9))
    inputs = [torch.randn(n, 4, 9, 9) for n in (1, 3, 5, 7)] * 3
    found: list[Tensor | None] = [None] * len(inputs)

    def run(index: int) -> None:
        with torch.inference_mode():
            found[index] = packed(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, found, strict=True):
        assert relative(y, model(x)) < 1e-5
        assert relative(packed(x), model(x)) < 1e-5  # after inference mode


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(by_zeros: None, dynamic: bool) -> None:
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    shapes = ({0: torch.export.Dim("n")},) if dynamic else None
    program = torch.export.export(packed, (x,), dynamic_shapes=shapes)
    names = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert "fst.kept_output_cpp.default" in names
    for batch in (2, 5) if dynamic else (2,):
        x = torch.randn(batch, 4, 9, 9)
        assert relative(program.module()(x), model(x)) < 1e-5


def test_training_is_refused_by_name(by_zeros: None) -> None:
    x = torch.randn(2, 4, 9, 9)
    packed = fst.pack(small(), x)
    with torch.enable_grad(), pytest.raises(UsageError, match="layer '0' .* gradient"):
        packed(x.clone().requires_grad_())
    with pytest.raises(UsageError, match="layer '0' .* training mode"):
        packed.train()(x)
    packed.eval().requires_grad_(True)
    with torch.enable_grad(), pytest.raises(UsageError, match="layer '0' .* gradient"):
        packed(x)
    packed(x)  # without gradients


def test_nan_and_infinities(by_zeros: None) -> None:
    model = nn.Sequential(nn.Conv2d(4, 1, 1, bias=False)).eval()
    model[0].weight.data = torch.tensor([0.0, 2.0, 0.0, 1.0]).view(1, 4, 1, 1)
    packed = fst.pack(model, torch.ones(1, 4, 2, 8))
    x = torch.ones(1, 4, 2, 8)
    x[0, 0] = torch.inf
    assert torch.equal(packed(x), torch.full((1, 1, 2, 8), 3.0))
    x[0, 1, 0, 0] = torch.nan
    assert packed(x).isnan().sum() == 1
    model[0].weight[0, 3] = torch.nan
    packed.load_state_dict(model.state_dict())
    assert packed(torch.ones(1, 4, 2, 8)).isnan().all()


def test_bfloat16(by_zeros: None) -> None:
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x, dtype=torch.bfloat16)
    found = packed(x.bfloat16())
    assert found.dtype == packed.report.dtype == torch.bfloat16
    assert relative(found.float(), model(x)) < 0.05
    assert {k: v.dtype for k, v in packed.state_dict().items() if k.startswith("0")} == {
        "0.weight": torch.float32,
        "0.bias": torch.float32,
    }


@pytest.mark.system
def test_inductor_and_another_process(by_zeros: None, tmp_path: Path) -> None:
    """torch.compile makes one graph; AOTInductor's file runs where the package is installed."""
    model, x = small(), torch.randn(2, 4, 9, 9)
    packed, file = fst.pack(model, x), tmp_path / "packed.pt2"
    assert relative(torch.compile(packed, fullgraph=True)(x), model(x)) < 1e-5
    torch._inductor.aoti_compile_and_package(
        torch.export.export(packed, (x,)), package_path=str(file)
    )
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, fst.ops.cpp.zeros_weight\n"
        "model = torch._inductor.aoti_load_package(sys.argv[1] + '/packed.pt2')\n"
        "torch.save(model(torch.load(sys.argv[1] + '/x.pt')), sys.argv[1] + '/y.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert relative(torch.load(tmp_path / "y.pt"), model(x)) < 1e-5


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
    assert type(packed) is Features
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
    rows = {row.name: row for row in packed.report.layers}
    assert rows["body.conv2"].follows == ("batch norm", "residual", "relu")
    assert rows["head"].runs == "zeros, over pixels"
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
    model = keep(Twice())
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


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no nn.Conv2d or nn.Linear"):
        fst.pack(nn.Sequential(nn.ReLU()), torch.randn(2, 3))
    with pytest.raises(ValueError, match="dtype"):
        fst.pack(small(), torch.randn(2, 4, 9, 9), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"example_input has shape \(0, 4, 9, 9\): nothing can be"):
        fst.pack(small(), torch.randn(0, 4, 9, 9))
