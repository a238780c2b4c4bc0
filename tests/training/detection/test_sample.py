"""Training steps of detectors on random data: counted and timed."""

import json

import pytest
import torch

import fst
from fst.lab.analysis import count_macs
from fst.lab.analysis.cli import main as analyze
from fst.lab.benchmark.cli import main as benchmark
from fst.lab.model import from_config
from fst.training.detection import sample


def test_a_random_batch_has_boxes_in_the_image_and_labels_of_the_model():
    model = torch.nn.Module()
    for classes in (1, 3):
        model.num_classes = classes
        batch = sample.random_batch(model, 5, 40, 60)
        assert [tuple(image.shape) for image in batch["inputs"]] == [(3, 40, 60)] * 5
        found = [s.gt_instances for s in batch["data_samples"]]
        assert all(len(boxes) == 4 for boxes in found)
        labels = torch.cat([boxes.labels for boxes in found])
        assert sorted(set(labels.tolist())) == list(range(classes))
        corners = torch.cat([boxes.bboxes for boxes in found])
        assert (corners[:, :2] < corners[:, 2:]).all() and (corners >= 0).all()
        assert (corners <= torch.tensor([60, 40, 60, 40])).all()


def test_the_size_is_that_of_the_training_pipeline():
    pipeline = [{"type": "LoadImageFromFile"}, {"type": "Resize", "scale": (1000, 600)}]
    assert sample.input_size(pipeline) == (600, 1000)
    assert sample.input_size(pipeline[:1]) is None


def test_every_weight_is_initialised_without_a_download(monkeypatch):
    """MMDetection's L2Norm has what its memory had until then."""
    monkeypatch.setattr("mmengine.runner.checkpoint.load_from_http", None)
    model = from_config("fst::configs/detection/dense_ssd300_voc0712.py", 1).model
    assert (model.neck.l2_norm.weight == 20).all()


def test_ssd_is_sparse_but_for_the_first_grad_input_and_tiny_maps(write_config):
    step = from_config(write_config("ssd"), 2)
    assert step.batch_shape == (2, 3, 96, 96) and step.root(step.model) is step.model
    fst.convert(step.model, "fst")
    report = count_macs(step.model, lambda: step.loss(step.model).backward())
    assert report.groups == ("backbone", "neck", "bbox_head") and not report.idle
    modes = {layer.name: {g: m.mode for g, m in layer.gemms.items()} for layer in report.layers}
    first = modes.pop("backbone.conv1")
    assert first["grad_input"] == "not computed" and first["grad_weight"] == "accelerated"
    tiny = {layer.name for layer in report.layers if layer.maps == ((2, 1, 1),)}
    assert "bbox_head.cls_convs.3.0" in tiny
    for name, mode in modes.items():
        expected = "dense" if name in tiny else "accelerated"
        assert (mode["output"], mode["grad_input"]) == ("simulated", "simulated"), name
        assert mode["grad_weight"] == expected, name
    assert report.total("output").share_sparse == report.total("grad_input").share_sparse == 1


def test_faster_rcnn_pays_for_no_frozen_gradient_and_shares_its_rpn_head(write_config):
    step = from_config(write_config("faster-rcnn"), 1)
    conversion = fst.convert(step.model, "fst")
    run = lambda: step.loss(step.model).backward()  # noqa: E731
    report = count_macs(step.model, run, conversion.skipped)
    layers = {layer.name: layer for layer in report.layers}
    frozen = [n for n in layers if n.startswith(("backbone.conv1", "backbone.layer1."))]
    assert len(frozen) == 5
    for name in frozen:
        gemms = layers[name].gemms
        assert gemms["output"].mode == "dense" and gemms["output"].dense > 0
        assert gemms["grad_input"].dense == gemms["grad_weight"].dense == 0
        assert gemms["grad_weight"].reason == "the weight needs no gradient"
    assert layers["backbone.layer2.0.conv1"].gemms["grad_input"].mode == "not computed"
    assert layers["backbone.layer2.0.conv2"].gemms["grad_input"].mode == "simulated"
    assert len(layers["rpn_head.rpn_conv"].maps) == 5
    linear = [layer for layer in report.layers if layer.kind == "linear"]
    assert {layer.group for layer in linear} == {"roi_head"} and len(linear) == 4
    assert report.total(kind="linear").sparse == 0
    assert "or if included" in linear[0].gemms["output"].reason


def test_the_tables_of_a_config(write_config, tmp_path, capsys):
    command = ["macs", write_config("faster-rcnn"), "--size", "64"]
    analyze([*command, "--strategies", "fst", "sdgp", "--out", str(tmp_path)])
    text = (tmp_path / "analysis.md").read_text()
    assert "1x3x64x64" in text and "mmdetection" in text and "--size 64" in text
    assert "| rpn_head" in text and "the weight needs no gradient" in text
    assert "or if included" in text
    analyze([*command, "--strategies", "fst", "--all", "--out", str(tmp_path)])
    assert "or if included" not in (tmp_path / "analysis.md").read_text()


@pytest.mark.system
def test_steps_of_a_detector_are_timed(write_config, tmp_path):
    out = tmp_path / "times"
    options = "--batch 1 --repeats 3 --measure steps memory --strategies fst --size 96 96".split()
    benchmark(["--model", write_config("ssd"), *options, "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["model"].endswith(".py")
    for measured in (report["steps"]["step"], report["memory"]):
        assert set(measured) == {"torch", "fst"}


def test_a_model_without_random_data_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("model = dict(type='BaseDataPreprocessor')\n")
    with pytest.raises(ValueError, match="random data is known"):
        from_config(str(path), 1, (8, 8))
