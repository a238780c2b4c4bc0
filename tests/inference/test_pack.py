from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import fst
from fst import backends
from fst.backends import timing
from fst.backends.record import MOST_SIZES
from fst.basics.errors import UsageError
from fst.inference import plans
from fst.inference.packed import PackedLayer, pack_layer
from fst.inference.report import NOTHING_GAINED
from fst.ops.backends.packed import ZerosOverImages
from fst.ops.cpp import missing
from tests.inference.ranks import rank
from tests.networks import Block, Inverted, keep, relative

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing"),
    pytest.mark.usefixtures("without_gradients"),
]


def small() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), Block(), nn.Dropout()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 5)),
    )
    return keep(net)


def inverted() -> nn.Module:
    """Three layers that are computed in one go."""
    torch.manual_seed(0)
    return keep(Inverted(4))


# small(): layers one by one; the second one is tested wherever a chain might differ
both_models = pytest.mark.parametrize("made", [small, inverted])


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
    rows = {row.layer: row for row in packed.report.layers}
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
    assert packed.report.layers[-1].decision.backend == "zeros_pixels"


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
    runs = {row.layer: row.decision.backend for row in packed.report.layers}
    assert runs["blocks.0.mlp.fc1"] == "zeros_pixels"


def test_what_follows_a_layer_becomes_part_of_it(by_zeros: None) -> None:
    model = small()
    packed = fst.pack(model, torch.randn(2, 4, 9, 9))
    assert {row.layer: row.follows for row in packed.report.layers} == {
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
    reasons = {row.layer: row.reason for row in fst.pack(model, x).report.layers}
    assert "parametrization" in reasons["3.conv1"] or "computed" in reasons["3.conv1"]
    prune.remove(model[3].conv1, "weight")
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    (row,) = [row for row in packed.report.layers if row.layer == "3.conv1"]
    assert row.density < 0.5 and row.decision.backend == "zeros_pixels"


def test_a_converted_model_is_folded(by_zeros: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    fst.convert(model, "srste")
    x = torch.randn(2, 8, 6, 6)
    packed = fst.pack(model, x)
    assert relative(packed(x), model(x)) < 1e-5
    assert packed.report.layers[0].density == 0.5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends by zeros, one for each call."""
    found: list[str] = []
    plan = ZerosOverImages.packed

    def counted(backend: ZerosOverImages, operands: object) -> Callable[[object], Tensor]:
        run = plan(backend, operands)
        return lambda o: found.append(backend.name) or run(o)

    monkeypatch.setattr(ZerosOverImages, "packed", counted)
    return found


def test_the_report_says_what_runs(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    ranks = {"dense": 3.0, "zeros_images": 2.0, "zeros_pixels": 5.0}
    whole = {"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 4.0}
    rank(monkeypatch, {**ranks, **whole})
    packed = fst.pack(small(), torch.randn(4, 4, 9, 9))
    rows = {row.layer: row for row in packed.report.layers}
    assert rows["0"].decision.backend == "zeros_images" and rows["9"].decision.backend == "dense"
    assert rows["0"].decision.times == ranks
    assert rows["0"].decision.reason == "measured: 1.50x the speed of dense"
    assert rows["9"].decision.reason == "measured: the default is the fastest"
    calls.clear()
    packed(torch.randn(4, 4, 9, 9))
    assert len(calls) == sum(row.decision.backend != "dense" for row in rows.values()) > 0
    text = str(packed.report)
    assert NOTHING_GAINED not in text and "The fastest one was 'packed'." in text
    assert (
        f"{torch.backends.cpu.get_cpu_capability()}, 1 thread(s), torch.float32, input 4x4x9x9"
        in text
    )
    assert ("In bfloat16 it is 0.44 times" in text) == torch.cpu._is_avx512_bf16_supported()


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
    packed.activation = activation
    for way in ("dense", "zeros_pixels"):
        packed.plans.only(way)
        found = packed(x, given, True)
        assert packed.plans.decision.backend == way and found.dtype == expected.dtype
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
def test_nothing_gained(monkeypatch: pytest.MonkeyPatch, slow: str, calls: list[str]) -> None:
    zeros = 9.0 if slow == "layers" else 1.0
    ranks = {"dense": 3.0, "zeros_images": zeros, "zeros_pixels": zeros}
    whole = {"plain": 9.0, "dense, batch norm folded": 8.0, "packed": 8.5}
    rank(monkeypatch, {**ranks, **whole})
    model, x = small(), torch.randn(4, 4, 9, 9)
    packed = fst.pack(model, x)
    assert not packed.report.gained and NOTHING_GAINED in str(packed.report)
    calls.clear()
    assert relative(packed(x), model(x)) < 1e-5 and not calls
    assert packed.report.layers[0].decision.times == ranks


def test_a_size_is_timed_once_and_few_are(monkeypatch: pytest.MonkeyPatch, by_zeros: None) -> None:
    model = keep(nn.Sequential(nn.Conv2d(8, 8, 3)))
    packed = fst.pack(model, torch.randn(1, 8, 5, 5))
    for batch in (*range(1, 14), *range(1, 14)):
        x = torch.randn(batch, 8, 5, 5)
        assert relative(packed(x), model(x)) < 1e-5
    found = packed.get_submodule("0").plans
    by_images = [times for times in found.record.times.values() if "zeros_images" in times]
    assert len(by_images) == MOST_SIZES and len(found._ready[1]) == plans.MOST_PLANS
    assert found.decision.reason == "as for most other sizes of this layer"


def test_times_are_kept_on_disk_and_those_of_another_machine_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FST_AUTOTUNE")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    races, race = [], timing.race
    monkeypatch.setattr(timing, "race", lambda *given: races.append(1) or race(*given))
    model, x = small(), torch.randn(4, 4, 9, 9)
    packed = fst.pack(model, x)
    measured = len(races)
    backends.forget_decisions()
    again = fst.pack(model, x)
    assert len(races) == measured > 0
    for name in ("0", "9"):
        kept, found = (net.get_submodule(name).plans.record for net in (packed, again))
        assert found.times == kept.times and any(kept.times.values())
    assert pickle.loads(pickle.dumps(packed)).get_submodule("0").plans.record.times
    monkeypatch.setattr("fst.backends.store.processor", lambda: "another")
    plans = pickle.loads(pickle.dumps(packed)).get_submodule("0").plans
    assert not plans.record.times
    assert plans.decision == packed.get_submodule("0").plans.decision


@both_models
def test_channels_last_and_other_strides(made: Callable[[], nn.Module], by_zeros: None) -> None:
    model = made()
    packed = fst.pack(model, torch.randn(2, 4, 9, 9))
    wide = torch.randn(4, 8, 9, 9)
    last = wide.to(memory_format=torch.channels_last)
    for x in (wide[:, :4], wide[:, ::2], last[:, :4], last[:2, :4].contiguous(), wide[:0, :4]):
        found, expected = packed(x), model(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError):
        packed(wide)


@both_models
def test_the_state_is_the_plain_models(made: Callable[[], nn.Module], by_zeros: None) -> None:
    model, x = made(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    plain = model.state_dict()
    assert list(packed.state_dict()) == list(plain)
    assert all(torch.equal(v, plain[k]) for k, v in packed.state_dict().items())
    torch.manual_seed(1)
    for p in model.parameters():
        p.mul_(1 + torch.rand_like(p))
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.running_mean.add_(0.5)
    packed.load_state_dict(model.state_dict())
    assert relative(packed(x), model(x)) < 1e-5


@both_models
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(made: Callable[[], nn.Module], by_zeros: None, copied: object) -> None:
    model, x = made(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x)
    twin = copied(packed)
    assert torch.equal(twin(x), packed(x)) and twin.report == packed.report
    for value in twin.state_dict().values():
        value.zero_()
    assert not torch.equal(twin(x), packed(x))
    assert relative(packed(x), model(x)) < 1e-5


def test_the_library_with_new_weights_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's layout of a weight serves other sizes, and is made again of another weight."""
    ranks = {"dense": 1.0, "zeros_images": 2.0, "zeros_pixels": 2.0}
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
    assert "fst.zeros_output_cpp.default" in {str(node.target) for node in program.graph.nodes}
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


def test_tensors_that_are_not_on_the_cpu_are_refused(by_zeros: None) -> None:
    model = keep(nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)))
    images = torch.randn(2, 16, 9, 9)
    packed = fst.pack(model, images)
    packed(images)
    with pytest.raises(UsageError, match="layer '0' is packed, for a CPU, and got tensors on"):
        packed(images.to("meta"))
    with pytest.raises(UsageError, match="for a CPU, and got tensors on cpu and meta"):
        packed.to("meta")(images)


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


@both_models
def test_bfloat16(made: Callable[[], nn.Module], by_zeros: None) -> None:
    model, x = made(), torch.randn(2, 4, 9, 9)
    packed = fst.pack(model, x, dtype=torch.bfloat16)
    found = packed(x.bfloat16())
    assert found.dtype == packed.report.dtype == torch.bfloat16
    assert relative(found.float(), model(x)) < 0.05
    chains = [row.decision.backend for row in packed.report.chains]
    assert chains == ["depthwise"] * (made is inverted)
    kept = packed.state_dict()
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert all(kept[f"{name}.weight"].dtype == torch.float32 for name in convolutions)


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
        "import sys, torch, fst.ops\n"
        "model = torch._inductor.aoti_load_package(sys.argv[1] + '/packed.pt2')\n"
        "torch.save(model(torch.load(sys.argv[1] + '/x.pt')), sys.argv[1] + '/y.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert relative(torch.load(tmp_path / "y.pt"), model(x)) < 1e-5


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no nn.Conv2d or nn.Linear"):
        fst.pack(nn.Sequential(nn.ReLU()), torch.randn(2, 3))
    with pytest.raises(ValueError, match="dtype"):
        fst.pack(small(), torch.randn(2, 4, 9, 9), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"example_input has shape \(0, 4, 9, 9\): nothing can be"):
        fst.pack(small(), torch.randn(0, 4, 9, 9))
