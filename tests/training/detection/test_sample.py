"""Training steps of detectors on random data."""

import json

import pytest
import torch

import fst
from fst.cli import main
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


@pytest.mark.parametrize(("detector", "shape"), [("ssd", (2, 3, 96, 96)), ("faster-rcnn", None)])
def test_a_sparse_detector_derives_its_loss(write_config, detector, shape):
    step = from_config(write_config(detector), 2)
    assert step.root(step.model) is step.model and shape in (None, step.batch_shape)
    fst.convert(step.model, "fst")
    step.loss(step.model).backward()
    for name, layer in fst.sparse_layers(step.model).items():
        assert layer.weight.requires_grad and layer.weight.grad.isfinite().all(), name


@pytest.mark.system
def test_steps_of_a_detector_are_timed(write_config, tmp_path):
    out = tmp_path / "times"
    options = "--batch 1 --repeats 3 --measure steps --strategies fst --size 96 96".split()
    main(["bench", "--model", write_config("ssd"), *options, "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["header"]["model"].endswith(".py")
    assert set(report["steps"]["step"]) == {"torch", "fst"}


def test_a_model_without_random_data_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("model = dict(type='BaseDataPreprocessor')\n")
    with pytest.raises(ValueError, match="random data is known"):
        from_config(str(path), 1, (8, 8))
