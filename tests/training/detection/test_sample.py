"""Training steps of detectors on random data: counted and timed."""

import json

import pytest
import torch

import fst
from fst.lab.benchmark.cli import main as benchmark
from fst.lab.macs import count_macs
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
    counted = count_macs(step.model, lambda: step.loss(step.model))
    assert {name.split(".")[0] for name in counted} == {"backbone", "neck", "bbox_head"}
    first = counted["backbone.conv1"]
    assert first["grad_input"].dense == 0 and first["grad_weight"].share_left == 0.5
    tiny = {name for name, macs in counted.items() if macs["grad_weight"].share_left == 1}
    assert "bbox_head.cls_convs.3.0" in tiny
    for name, macs in counted.items():
        if name != "backbone.conv1":
            assert macs["output"].share_left <= 0.5 and macs["grad_input"].share_left < 0.7, name
            assert name in tiny or macs["grad_weight"].share_left < 0.7, name


def test_faster_rcnn_pays_for_no_frozen_gradient_and_shares_its_rpn_head(write_config):
    step = from_config(write_config("faster-rcnn"), 1)
    fst.convert(step.model, "fst")
    counted = count_macs(step.model, lambda: step.loss(step.model))
    frozen = [n for n in counted if n.startswith(("backbone.conv1", "backbone.layer1."))]
    assert len(frozen) == 5
    for name in frozen:
        macs = counted[name]
        assert macs["output"].dense > 0 and macs["output"].share_left == 1
        assert macs["grad_input"].dense == macs["grad_weight"].dense == 0
    assert counted["backbone.layer2.0.conv1"]["grad_input"].dense == 0
    assert counted["backbone.layer2.0.conv2"]["grad_input"].share_left == 0.5
    linear = count_macs(step.model, lambda: step.loss(step.model), (torch.nn.Linear,))
    assert len(linear) == 4 and all(name.startswith("roi_head") for name in linear)
    assert all(macs["output"].share_left == 1 for macs in linear.values())


@pytest.mark.system
def test_steps_of_a_detector_are_timed(write_config, tmp_path):
    out = tmp_path / "times"
    options = "--batch 1 --repeats 3 --measure steps --strategies fst --size 96 96".split()
    benchmark(["--model", write_config("ssd"), *options, "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["model"].endswith(".py")
    assert set(report["steps"]["step"]) == {"torch", "fst"}


def test_a_model_without_random_data_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("model = dict(type='BaseDataPreprocessor')\n")
    with pytest.raises(ValueError, match="random data is known"):
        from_config(str(path), 1, (8, 8))
