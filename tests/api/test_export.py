"""Exported files hold the folded model: its zeros, its outputs, for any batch."""

import copy
import importlib
import math
import sys
import threading

import pytest
import torch
import torchvision
from torch import nn

import fst
from fst.api.difference import relative_difference
from fst.files import formats
from fst.files.weights import read_stored

pytest.importorskip("onnxruntime")
COMPUTING = (".onnx", ".pt2")


def network() -> nn.Sequential:
    """Convolutions with and without batch norm, a depthwise one, and linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    for _ in range(3):  # so that batch norm has statistics that are not 0 and 1
        model(torch.randn(8, 4, 8, 8) * 2 + 1)
    return model


@pytest.fixture
def converted() -> nn.Sequential:
    model = network()
    fst.convert(model, "srste", include=[nn.Conv2d, "8"])
    return model


def outputs(path, images):
    (found,) = formats.FORMATS[path.suffix].outputs(path, (images,))
    return found


@pytest.mark.parametrize("suffix", COMPUTING)
def test_outputs_are_those_of_the_folded_model_for_any_batch(converted, tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    report = fst.export(converted, path, torch.randn(1, 4, 8, 8))
    assert report.difference < 1e-5 and str(path) in str(report)
    plain = fst.fold(converted).eval()
    for batch in (1, 2, 5):
        images = torch.randn(batch, 4, 8, 8)
        torch.testing.assert_close(outputs(path, images), plain(images), rtol=1e-4, atol=1e-5)
    assert converted.training and len(fst.sparse_layers(converted)) == 4
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", formats.FORMATS)
def test_weights_in_the_file_keep_their_pattern(converted, tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    report = fst.export(converted, path, torch.randn(2, 4, 8, 8))
    by_name = {weight.name: weight for weight in report.weights}
    assert {name: weight.pattern for name, weight in by_name.items()} == {
        **dict.fromkeys(("0.weight", "5.weight", "8.weight"), "2:4"),
        **dict.fromkeys(("3.weight", "10.weight"), ""),
    }
    assert by_name["0.weight"].density == 0.5 and by_name["10.weight"].density == 1.0
    assert by_name["3.weight"].is_exempt and by_name["10.weight"].groups is None
    stored = read_stored(path).weights
    assert fst.verify(stored, include=["0.weight", "5.weight"]).ok


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("tsm", {}, "2:4"),
        ("tsm", {"group_order": "im2col"}, "2:4 along im2col"),
        ("fst", {"literal": True}, "2:4 along im2col"),
    ],
)
def test_every_promised_pattern_is_checked(name, options, pattern, tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False))
    fst.convert(model, fst.get_strategy(name, **options))
    path = tmp_path / "model.safetensors"
    report = fst.export(model, path)
    assert [weight.pattern for weight in report.weights] == [pattern]
    assert f"read back, of 1 weight 1 is {pattern}; it was not run" in str(report)
    model[0].set_mask(torch.ones_like(model[0].weight, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=f"'0.weight' is not {pattern}: "):
        fst.export(model, path)


def test_a_fixed_batch(converted, tmp_path):
    path = tmp_path / "model.pt2"
    fst.export(converted, path, torch.randn(1, 4, 8, 8), dynamic_batch=False)
    assert outputs(path, torch.randn(1, 4, 8, 8)).shape == (1, 10)
    with pytest.raises(AssertionError, match=r"size\(\)\[0\] == 1"):
        outputs(path, torch.randn(2, 4, 8, 8))


def test_a_computed_weight_is_not_listed(tmp_path):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 1)), network()[5])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2)
    report = fst.export(model, tmp_path / "m.safetensors")
    assert [weight.name for weight in report.weights] == ["1.weight"]


@pytest.mark.parametrize("opset", [None, 13])
def test_linear_layers_on_sequences(opset, tmp_path):
    """Their weights are stored transposed in ONNX."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    fst.convert(model, "srste", include=nn.Linear)
    report = fst.export(model, tmp_path / "m.onnx", torch.randn(2, 5, 64), opset=opset)
    assert [weight.pattern for weight in report.weights] == ["2:4", "2:4"]
    assert fst.verify(tmp_path / "m.onnx").coverage == 1


def test_safetensors_are_the_folded_state_dict(converted, tmp_path):
    path = tmp_path / "model.safetensors"
    report = fst.export(converted, path)
    assert report.difference is None and "it was not run" in str(report)
    stored, expected = read_stored(path).weights, fst.fold(converted).state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    assert fst.verify(path).ok


@pytest.mark.parametrize("strategy", ["dense", "sdgp", "dpf", "tsm"])
def test_other_strategies(strategy, tmp_path):
    model = network()
    fst.convert(model, strategy)
    report = fst.export(model, tmp_path / "m.pt2", torch.randn(2, 4, 8, 8))
    assert report.difference == 0 and len(report.weights) == 5


@pytest.mark.system
def test_a_model_of_torchvision(tmp_path):
    model = torchvision.models.mobilenet_v3_small(num_classes=10)
    fst.convert(model, "fst")
    report = fst.export(model, tmp_path / "m.onnx", torch.randn(1, 3, 32, 32))
    assert report.difference < 1e-4
    whole = [w for w in fst.sparse_layers(model).values() if w.in_channels // w.groups >= 4]
    assert sum(bool(weight.pattern) for weight in report.weights) == len(whole) == 40


def test_a_file_that_lost_a_zero_is_refused(converted, tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    kind = formats.FORMATS[".safetensors"]

    def damaged(change):
        def write(model, *arguments):
            model = copy.deepcopy(model)
            with torch.no_grad():
                change(model[0])
            kind.write(model, *arguments)

        monkeypatch.setitem(formats.FORMATS, ".safetensors", kind._replace(write=write))

    damaged(lambda layer: layer.weight.copy_(torch.where(layer.weight == 0, 1e-3, layer.weight)))
    with pytest.raises(RuntimeError, match=r"'0.weight' has \d+ elements that S\(W\)"):
        fst.export(converted, path)
    damaged(lambda layer: layer._parameters.pop("weight"))
    with pytest.raises(RuntimeError, match="does not hold the weight '0.weight'"):
        fst.export(converted, path)
    wrong = kind._replace(outputs=lambda file, inputs: [torch.zeros(2, 10)])
    monkeypatch.setitem(formats.FORMATS, ".safetensors", wrong)
    with pytest.raises(RuntimeError, match="outputs differ from the model's"):
        fst.export(converted, path, torch.randn(2, 4, 8, 8))
    assert not list(tmp_path.iterdir())


class Outputs(nn.Module):
    """A 1x1 convolution, and what a function makes of its output."""

    def __init__(self, outputs):
        super().__init__()
        self.conv, self.outputs = nn.Conv2d(3, 4, 1), outputs

    def forward(self, images):
        return self.outputs(self.conv(images))


def two_scores(found):
    """The second output is a thousandth of the first, which hides it in one scale for both."""
    return found, found.mean((2, 3)) / 1000


@pytest.mark.parametrize("suffix", COMPUTING)
def test_other_than_float_outputs(suffix, tmp_path):
    model = Outputs(lambda found: (found, found > 0, found.argmax(1), None, found.shape[0]))
    assert fst.export(model, tmp_path / f"m{suffix}", torch.randn(1, 3, 4, 4)).difference < 1e-5


@pytest.mark.parametrize("suffix", COMPUTING)
def test_a_file_that_is_another_model_for_one_sample_is_refused(suffix, tmp_path):
    model = Outputs(lambda found: found * 2 if found.shape[0] == 1 else found)
    with pytest.raises(RuntimeError, match=r"output 0 by .* on a batch of \(1, 3, 4, 4\)"):
        fst.export(model, tmp_path / f"m{suffix}", torch.randn(2, 3, 4, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda first, second: [first, second.flip(1)], "output 1 by"),
        (lambda first, second: [first, second * torch.nan], "output 1 by nan"),
        (lambda first, second: [first * torch.nan, second], "output 0 by nan"),
        (lambda first, second: [first, second[:, :1]], "output 1 by inf"),
        (lambda first, second: [first], "has 1 outputs"),
    ],
)
def test_each_output_is_compared_by_its_own_scale(damage, message, tmp_path, monkeypatch):
    kind = formats.FORMATS[".pt2"]
    damaged = kind._replace(outputs=lambda file, inputs: damage(*kind.outputs(file, inputs)))
    monkeypatch.setitem(formats.FORMATS, ".pt2", damaged)
    with pytest.raises(RuntimeError, match=message):
        fst.export(Outputs(two_scores), tmp_path / "m.pt2", torch.randn(2, 3, 4, 4))


@pytest.mark.exhaustive
@pytest.mark.system
def test_a_fault_of_the_runtime_is_not_the_files(converted, tmp_path, monkeypatch):
    """Where outputs differ with the runtime's optimisations alone, the report says so."""
    kind, images = formats.FORMATS[".onnx"], torch.randn(2, 4, 8, 8)

    def off(file, inputs):
        return [found * 1.01 for found in kind.outputs(file, inputs)]

    monkeypatch.setitem(formats.FORMATS, ".onnx", kind._replace(outputs=off))
    report = fst.export(converted, tmp_path / "m.onnx", images)
    assert report.difference < 1e-5 and report.optimised == pytest.approx(0.01, rel=1e-3)
    assert "onnxruntime's own optimisations change them by 1.0e-02" in str(report)
    monkeypatch.setitem(formats.FORMATS, ".onnx", kind._replace(outputs=off, unoptimised=off))
    with pytest.raises(RuntimeError, match="outputs differ from the model's: output 0 by 1.0e-02"):
        fst.export(converted, tmp_path / "m.onnx", images)
    monkeypatch.undo()
    assert fst.export(converted, tmp_path / "m.onnx", images).optimised is None


@pytest.mark.parametrize("suffix", COMPUTING)
def test_an_input_without_a_batch_axis_is_said(converted, tmp_path, suffix):
    with pytest.raises(ValueError, match=r"its first sample, of shape \(1, 8, 8\): .*a batch"):
        fst.export(converted, tmp_path / f"m{suffix}", torch.randn(4, 8, 8))
    assert not list(tmp_path.iterdir())
    path, layer = tmp_path / f"m{suffix}", nn.Sequential(nn.Conv2d(4, 8, 3))
    fst.convert(layer, "srste")
    assert fst.export(layer, path, torch.randn(4, 8, 8), dynamic_batch=False).difference < 1e-5


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        ({"x": torch.zeros(1)}, TypeError, "example_input is a dict; it must be a tensor"),
        ((torch.zeros(1), 3), TypeError, "is a tuple of Tensor, int"),
        (torch.tensor(1.0), ValueError, "a tensor of no dimension"),
        (torch.zeros(2, 4, 8, 8).bfloat16(), ValueError, r"example_input\[0\] is torch.bfloat16"),
    ],
)
def test_bad_example_inputs(converted, tmp_path, example, error, message):
    with pytest.raises(error, match=message):
        fst.export(converted.to(torch.bfloat16), tmp_path / "m.onnx", example)


def test_bad_arguments(converted, tmp_path, monkeypatch):
    images = torch.randn(2, 4, 8, 8)
    with pytest.raises(ValueError, match="suffix '.onx' is unknown. Did you mean '.onnx'?"):
        fst.export(converted, tmp_path / "m.onx", images)
    with pytest.raises(ValueError, match="example_input=None: a .onnx file needs a batch"):
        fst.export(converted, tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        fst.export(converted, tmp_path / "absent" / "m.onnx", images)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fst-train\[export\]'"):
        fst.export(converted, tmp_path / "m.onnx", images)


@pytest.mark.parametrize("suffix", formats.FORMATS)
def test_a_link_may_name_a_file_of_another_suffix(converted, tmp_path, suffix):
    """As stores of large files keep them, by their content."""
    blob, path, mine = tmp_path / "0f3c", tmp_path / f"m{suffix}", tmp_path / f"m.partial{suffix}"
    path.symlink_to(blob)
    mine.write_text("mine")
    fst.export(converted, path, torch.randn(2, 4, 8, 8))
    assert path.is_symlink() and fst.verify(path).ok and blob.stat().st_size
    assert mine.read_text() == "mine"


def test_exports_to_one_path_at_once_leave_a_whole_file(tmp_path):
    path, errors = tmp_path / "model.safetensors", []
    models = [nn.Sequential(nn.Conv2d(8, 8, 3)) for _ in range(3)]
    for model in models:
        fst.convert(model, "srste")

    def export(model):
        try:
            for _ in range(10):
                fst.export(model, path)
        except Exception as error:  # whatever it is, the test names it
            errors.append(error)

    threads = [threading.Thread(target=export, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stored = read_stored(path).weights
    assert any(torch.equal(stored["0.bias"], model[0].bias) for model in models)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class _Logarithm(nn.Module):
    def forward(self, maps):
        return maps.log()


@pytest.mark.parametrize("suffix", COMPUTING)
def test_outputs_that_are_not_finite_are_compared_and_said(tmp_path, suffix):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 1), _Logarithm())
    report = fst.export(model, tmp_path / f"m{suffix}", torch.randn(2, 4, 3, 3))
    assert report.not_finite > 0 and report.difference < 1e-5
    assert f"{report.not_finite} values of the model's own outputs are not finite" in str(report)


def test_a_value_that_only_the_file_lacks_is_a_difference():
    whole, holed = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert relative_difference(holed, holed) == 0
    assert math.isnan(relative_difference(holed, whole)) and math.isnan(
        relative_difference(whole, holed)
    )


def test_a_model_too_large_for_one_onnx_file_is_refused(converted, tmp_path, monkeypatch):
    exporter = importlib.import_module("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr(exporter, "_LARGE_MODEL_THRESHOLD", 100)
    with pytest.raises(ValueError, match=r"too large for a single \.onnx file"):
        fst.export(converted, tmp_path / "m.onnx", torch.randn(2, 4, 8, 8))
    assert not list(tmp_path.iterdir())


def test_weights_that_were_trained_since_they_were_folded_are_refused(tmp_path):
    model = network()
    fst.convert(model, "srste")
    plain = fst.fold(model)
    plain[0].weight.data += 0.1
    with pytest.raises(RuntimeError, match=r"'0.weight' is not 2:4: 4 non-zero .* fst.hold keeps"):
        fst.export(plain, tmp_path / "x.safetensors")
    plain = fst.fold(model)
    plain[0].weight.data[0, :2, 0, 0] = float("nan")
    plain[0].weight.data[0, 2:, 0, 0] = 0
    assert "2 values are not finite" in str(fst.verify(plain))
    assert not fst.verify(plain).ok


class Upsampled(nn.Module):
    """A network that halves maps and doubles them again, as for segmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(4, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.up = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, images):
        if images.shape[2] % 4 or images.shape[3] % 4:
            raise ValueError(f"{tuple(images.shape)} is no multiple of 4")
        maps = self.norm(self.down(images)).relu()
        maps = nn.functional.interpolate(maps, scale_factor=2.0, mode="nearest")
        return self.up(maps) + images


@pytest.mark.parametrize(
    ("suffix", "options"), [(".onnx", {}), (".onnx", dict(opset=13)), (".pt2", {})]
)
@pytest.mark.parametrize("batch", [True, False])
def test_other_heights_and_widths(suffix, options, batch, tmp_path):
    model, path = Upsampled(), tmp_path / f"m{suffix}"
    fst.convert(model, "srste")
    options = dict(dynamic_batch=batch, dynamic=True, **options)
    fst.export(model, path, torch.randn(2, 4, 32, 16), **options)
    plain = fst.fold(model).eval()
    for size in ((2, 4, 32, 16), (2, 4, 24, 40), *[(3, 4, 64, 64)] * batch):
        images = torch.randn(size)
        torch.testing.assert_close(outputs(path, images), plain(images), rtol=1e-4, atol=1e-5)
    assert fst.verify(path).ok


@pytest.mark.parametrize("file", ["m.onnx", "m.pt2"])
def test_an_example_of_inference_mode(converted, tmp_path, file):
    with torch.inference_mode():
        images = torch.randn(2, 4, 8, 8)
        within = fst.export(converted, tmp_path / file, images)
    assert max(within.difference, fst.export(converted, tmp_path / file, images).difference) < 1e-5


def test_a_model_of_one_size_is_no_dynamic_file(tmp_path):
    with pytest.raises(ValueError, match="does not compute it with 32 rows and 64 columns more"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
        fst.export(model, tmp_path / "m.onnx", torch.randn(2, 4, 8, 8), dynamic=True)
    with pytest.raises(ValueError, match=r"no tensor of example_input is \(N, C, H, W\)"):
        fst.export(nn.ReLU(), tmp_path / "m.onnx", torch.randn(2, 4), dynamic=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 21])
def test_other_opsets(converted, tmp_path, opset):
    import onnx

    path = tmp_path / "m.onnx"
    report = fst.export(converted, path, torch.randn(2, 4, 8, 8), opset=opset)
    assert onnx.load(path).opset_import[0].version == opset and report.difference < 1e-5
    assert [w.pattern for w in report.weights] == ["2:4", "", "2:4", "2:4", ""]
    images, plain = torch.randn(5, 4, 8, 8), fst.fold(converted).eval()
    torch.testing.assert_close(outputs(path, images), plain(images), rtol=1e-4, atol=1e-5)
    assert fst.verify(path).coverage == fst.verify(plain).coverage


class Sampled(nn.Module):
    def forward(self, images):
        return torch.nn.functional.grid_sample(images, images.permute(0, 2, 3, 1)[..., :2])


def test_an_opset_that_cannot_hold_the_model_names_the_least(tmp_path):
    model, images = Sampled(), torch.rand(2, 4, 8, 8)
    with pytest.raises(ValueError, match=r"opset=13: .*The least opset that it takes is 16\."):
        fst.export(model, tmp_path / "m.onnx", images, opset=13)
    assert not list(tmp_path.iterdir())
    fst.export(model, tmp_path / "m.onnx", images, opset=16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.onnx", dict(opset=3), "opset=3 must be an integer >= 7"),
        ("m.onnx", dict(opset="13"), "opset='13' must be an integer >= 7"),
        ("m.onnx", dict(opset=99), "opset=99"),
        ("m.pt2", dict(opset=13), "opset=13: only .onnx files have it, not .pt2"),
        ("m.safetensors", dict(dynamic=True), "dynamic=True: only .onnx and .pt2 files have it"),
    ],
)
def test_bad_options(converted, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        fst.export(converted, tmp_path / name, torch.randn(2, 4, 8, 8), **options)
    assert not list(tmp_path.iterdir())
