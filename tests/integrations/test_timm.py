"""timm's padded and standardised convolutions train sparsely, with their own arithmetic."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import (
    BatchNormAct2d,
    Conv2dSame,
    ScaledStdConv2d,
    ScaledStdConv2dSame,
    StdConv2d,
    StdConv2dSame,
)
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

import fst
from fst.api.convert import SPARSE_CLASSES, register_layer
from fst.layers.modules import SparseConv2d
from tests.cases import error
from tests.oracle.conv import reference_conv2d
from tests.strategy_settings import setting

STANDARDISED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)
ROWS = ["srste-decay_large", "fst", "fst-im2col", "sdgp", "tsm", "fst_sampled"]
NETWORKS = {  # layers that are converted, and those whose groups are all shorter than 4
    "tf_efficientnet_b0": (81, 17),
    "resnetv2_50x1_bit": (54, 1),
    "nf_resnet50": (53, 1),
    "resnetblur18": (20, 1),
}


def layer(kind: type[nn.Conv2d], stride: int = 2) -> nn.Conv2d:
    """8 to 12 channels; dynamic padding of an even size is not the same on both sides."""
    torch.manual_seed(0)
    options = {} if kind is Conv2dSame else {"eps": 1e-3}
    made = kind(8, 12, 3, stride=stride, bias=True, **options).double()
    if "gain" in made._parameters:
        nn.init.normal_(made.gain)
    return made


def batch() -> Tensor:
    return torch.randn(2, 8, 8, 9, generator=torch.Generator().manual_seed(1)).double()


def standardised(made: nn.Conv2d, weight: Tensor, gain: Tensor | None) -> Tensor:
    """(w − mean) / sqrt(var + eps) of each filter, times gain / sqrt(fan-in) (arXiv 2101.08692)."""
    if isinstance(made, Conv2dSame):
        return weight
    variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True, correction=0)
    weight = (weight - mean) / (variance + made.eps).sqrt()
    return weight if gain is None else weight * gain / made.weight[0].numel() ** 0.5


def padded(made: nn.Conv2d, input: Tensor) -> tuple[Tensor, int]:
    """SAME padding at stride 2: 8x9 has one row more below, and one column on either side."""
    if getattr(made, "same_pad", isinstance(made, Conv2dSame)):
        return F.pad(input, (1, 1, 0, 1)), 0
    return input, 1


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", (Conv2dSame, *STANDARDISED))
def test_equals_the_composed_reference(kind: type[nn.Conv2d], row: str) -> None:
    """Standardise, prune, convolve; gradients through the standardisation, the decay too."""
    strategy = setting(row).build()
    made = layer(kind)
    fst.convert(made, strategy)
    input = batch().requires_grad_()
    torch.manual_seed(5)
    start = torch.rand((), dtype=torch.float64)
    torch.manual_seed(5)
    output = made(input)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    found = {name: p.grad.clone() for name, p in made.named_parameters()}

    leaves = {n: p.detach().clone().requires_grad_() for n, p in made.named_parameters()}
    source = batch().requires_grad_()
    image, padding = padded(made, source)
    weight = standardised(made, leaves["weight"], leaves.get("gain"))
    expected = reference_conv2d(
        image.detach(),
        weight.detach(),
        grad_output,
        bias=leaves["bias"].detach(),
        stride=2,
        padding=padding,
        # of a stored weight the optimizer's step adds the decay
        strategy=replace(strategy, decay=0.0) if kind is Conv2dSame else strategy,
        draws={"start": start},
    )
    image.backward(expected.grad_input)
    weight.backward(expected.grad_weight)
    assert error(output.detach(), expected.output) <= 1e-10
    assert error(input.grad, source.grad) <= 1e-10
    for name in leaves:
        wanted = expected.grad_bias if name == "bias" else leaves[name].grad
        assert error(found[name], wanted) <= 1e-10, name


def test_a_standardised_weight_decays_once() -> None:
    """In the backward pass alone: an optimizer's step must not add it to the stored weight."""
    made = layer(StdConv2d)
    fst.convert(made, fst.get_strategy("srste", decay=0.5))
    made(batch()).sum().backward()
    before, weight = made.weight.grad.clone(), made.weight.detach().clone()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert torch.equal(made.weight.grad, before)
    torch.testing.assert_close(made.weight.detach(), weight - 0.1 * before)
    assert made.state.step == 1


@pytest.mark.parametrize("kind", (Conv2dSame, *STANDARDISED))
def test_fold_writes_what_the_gemm_multiplies(kind: type[nn.Conv2d]) -> None:
    made = layer(kind)
    keys = list(made.state_dict())
    fst.convert(made, "srste")
    assert list(made.state_dict()) == keys and isinstance(made, kind)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    folded = fst.fold(made.eval())
    pads = getattr(made, "same_pad", kind is Conv2dSame)
    assert type(folded) is (Conv2dSame if pads else nn.Conv2d)
    assert list(folded.state_dict()) == ["weight", "bias"]
    assert not {"eps", "gain", "scale", "same_pad"} & folded.__dict__.keys()
    weight = standardised(made, made.weight, made._parameters.get("gain")).detach()
    kept = folded.weight != 0
    assert kept.unflatten(1, (-1, 4)).sum(2).eq(2).all()
    torch.testing.assert_close(folded.weight.detach(), weight * kept)
    for other in (made, copied.eval()):
        torch.testing.assert_close(folded(batch()), other(batch()), rtol=0, atol=1e-12)
    for target in (made, folded, folded.state_dict()):
        report = fst.verify(target)
        assert report.ok and report.coverage == 1.0
    assert not fst.verify(made.state_dict()).ok  # the stored weight is dense
    fst.fold(made, inplace=True)
    fst.convert(made, "fst")  # plain again


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_convert_fully(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    keys = list(model.state_dict())
    report = fst.convert(model, "fst")
    exempt = [w.name for w in report.covered.rows if w.label.startswith("exempt")]
    assert (len(report.layers), len(exempt)) == NETWORKS[name]
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in report.skipped)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("row", ["srste", "fst", "sdgp"])
@pytest.mark.parametrize("name", ["test_efficientnet", "test_nfnet", "resnetv2"])
def test_small_networks_train_and_fold(name: str, row: str) -> None:
    torch.manual_seed(0)
    if name == "resnetv2":
        sizes = {"layers": (1, 1), "channels": (16, 32), "stem_chs": 8, "num_classes": 10}
        model = ResNetV2(**sizes, conv_layer=StdConv2d, norm_layer=BatchNormAct2d)
    else:
        model = timm.create_model(name, num_classes=10)
    for parameter in model.parameters():
        if not parameter.any():  # a branch that starts from zero would learn a step later
            nn.init.normal_(parameter)
    report = fst.convert(model, row)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(2, 3, 65, 65)).logsumexp(1).sum().backward()
    optimizer.step()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert all(p.isfinite().all() for p in model.parameters())
    folded, images = fst.fold(model.eval()), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images))
    assert fst.verify(folded).coverage == pytest.approx(report.coverage)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_export(tmp_path, suffix: str) -> None:
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(
        *(Conv2dSame(3, 8, 3, stride=2), nn.ReLU(), ScaledStdConv2dSame(8, 8, 3, stride=2)),
        *(nn.ReLU(), StdConv2d(8, 8, 1)),
    )
    fst.convert(model, "srste")
    report = fst.export(model, tmp_path / f"model{suffix}", torch.randn(1, 3, 9, 10))
    assert {weight.name: weight.pattern for weight in report.weights} == {
        "0.weight": "",
        "2.weight": "2:4",
        "4.weight": "2:4",
    }
    assert "1 from ScaledStdConv2dSame to Conv2dSame, 1 from StdConv2d to Conv2d" in str(report)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [("asp", "asp"), ("rigl", "rigl"), (fst.get_strategy("fst", decay_mode="decoupled"), "decoup")],
)
def test_what_acts_on_stored_weights_leaves_standardised_ones_dense(strategy, word: str) -> None:
    model = nn.Sequential(layer(StdConv2d), Conv2dSame(12, 8, 3))
    report = fst.convert(model, strategy)
    assert list(report.converted) == ["1"] and type(model[0]) is StdConv2d
    assert "standardised" in report.skipped["0"] and word in report.skipped["0"]


class Unknown(StdConv2d):
    """A subclass that may compute anything."""


def test_unknown_subclasses_stay_dense_until_they_are_registered(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["fst.api.convert"], "SPARSE_CLASSES", dict(SPARSE_CLASSES))
    model = nn.Sequential(Unknown(8, 8, 3), nn.Conv2d(8, 8, 3))
    report = fst.convert(model, "fst")
    assert "Unknown is a subclass of Conv2d" in report.skipped["0"]
    assert report.coverage == 0.5

    @register_layer
    class SparseUnknown(SparseConv2d, Unknown):
        dense_class = Unknown

    model = nn.Sequential(Unknown(8, 8, 3))
    assert fst.convert(model, "fst").coverage == 1.0 and type(model[0]) is SparseUnknown


def test_autocast_and_frozen_weights_agree_with_the_folded_layer() -> None:
    made = layer(ScaledStdConv2d).float().eval()
    fst.convert(made, "srste")
    folded, images = fst.fold(made), batch().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with fst.frozen(made):
            first, second = made(images), made(images)
        assert first.dtype == torch.bfloat16 and torch.equal(first, second)
        torch.testing.assert_close(first, folded(images))
