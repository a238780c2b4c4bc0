"""Both detectors are exported up to their heads' outputs."""

import copy
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from PIL import Image
from torch import nn

import fst
from fst.cli import main
from fst.lab.benchmark.inference import network
from fst.ops.cpp import missing
from fst.training.detection import sample
from fst.training.detection.deploy import HeadOutputs
from fst.training.engine.config import load_config
from fst.training.engine.export import deployable
from fst.training.engine.model import build_model
from tests.inference.ranks import BY_ZEROS, rank
from tests.training.detection import toy

onnxruntime = pytest.importorskip("onnxruntime")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize(
    ("detector", "head"),
    [("ssd", "bbox_head"), ("faster-rcnn", "rpn_head")],
)
@pytest.mark.system
def test_detectors_are_exported(detector, head, write_config, tmp_path):
    config = load_config(write_config(detector, sparsity='dict(strategy="fst")'))
    model = build_model(config)
    model.init_weights()  # mmdet's L2Norm is not initialised before
    fst.convert(model, "fst")
    images = torch.randn(1, 3, 96, 128)
    report = fst.export(deployable(model), tmp_path / "m.onnx", images)
    assert report.difference < 1e-4
    names = {weight.name for weight in report.weights if weight.pattern}
    assert names == {
        f"{name}.weight"
        for name, layer in fst.sparse_layers(model).items()
        if not name.startswith("roi_head") and layer.in_channels >= 4
    }
    assert any(name.startswith(head) for name in names)


@pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")
@pytest.mark.parametrize(("detector", "head"), [("ssd", "bbox_head"), ("faster-rcnn", "rpn_head")])
def test_detectors_are_packed(detector, head, write_config, tmp_path, monkeypatch):
    """By the command up to the head's outputs, and whole, with what predicts boxes."""
    rank(monkeypatch, BY_ZEROS)
    config = write_config(detector, sparsity='dict(strategy="srste")')
    model = build_model(load_config(config)).eval()
    torch.manual_seed(0)
    model.init_weights()
    fst.convert(model, "srste")
    checkpoint, out = str(tmp_path / "epoch_1.pth"), str(tmp_path / "packed.pt")
    sparsity = fst.sparsity_state(model)
    torch.save({"state_dict": model.state_dict(), "sparsity": sparsity}, checkpoint)
    main(["pack", config, checkpoint, out, "--size", "96"])
    plain, images = fst.fold(model), torch.randn(2, 3, 96, 128)
    packed = torch.load(out, weights_only=False)
    rows = {row.layer: row for row in packed.report.layers}
    assert all(row.decision.backend == "zeros_pixels" for row in rows.values())
    assert {"backbone", head} <= {name.partition(".")[0] for name in rows}
    assert any("batch norm" in row.follows for row in rows.values())
    with torch.inference_mode():
        for found, expected in zip(packed(images), HeadOutputs(plain)(images), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    data = plain.data_preprocessor(sample.random_batch(plain, 1, 96, 96), training=False)
    given = (data["inputs"], data["data_samples"], "predict")
    whole = fst.pack(plain, given)
    assert {row.decision.backend for row in whole.report.layers} == {"zeros_pixels"}
    assert "no output is a tensor" in str(whole.report)
    with torch.no_grad():
        (found,), (expected,) = (net(*given) for net in (whole, copy.deepcopy(plain)))
    assert len(found.pred_instances) == len(expected.pred_instances) > 0
    torch.testing.assert_close(found.pred_instances.scores, expected.pred_instances.scores)


@pytest.mark.system
@pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing")
@pytest.mark.parametrize("name", ["ssd300_voc0712", "faster-rcnn_r50_fpn_voc0712"])
def test_large_detectors_are_packed(name, monkeypatch):
    rank(monkeypatch, BY_ZEROS)
    model, images = network(f"fst::configs/detection/dense_{name}.py", 1, (300, 300))
    fst.convert(model, "srste", layers="all")
    packed = fst.pack(model, images)
    assert packed.report.difference < 1e-4 and packed.report.gained


@pytest.mark.system
def test_the_example_decodes_a_file_as_mmdet_does(write_config, tmp_path, capsys):
    config = write_config("ssd", sparsity='dict(strategy="srste")')
    model = build_model(load_config(config))
    torch.manual_seed(0)
    model.init_weights()
    nn.init.normal_(model.bbox_head.cls_convs[0][-1].weight, std=0.05)
    nn.init.normal_(model.bbox_head.reg_convs[0][-1].weight, std=0.1)
    fst.convert(model, "srste")
    checkpoint, out = str(tmp_path / "epoch_1.pth"), str(tmp_path / "m.onnx")
    meta = {"dataset_meta": {"classes": toy.CLASSES}}
    sparsity = fst.sparsity_state(model)
    torch.save({"state_dict": model.state_dict(), "sparsity": sparsity, "meta": meta}, checkpoint)
    assert main(["export", config, checkpoint, out, "--size", "96"]) == 0
    assert "images: RGB, (x - [123.675" in capsys.readouterr().out

    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    levels = range(4)
    names = [f"{what}_{level}" for what in ("scores", "boxes") for level in levels]
    assert [output.name for output in session.get_outputs()] == names
    properties = session.get_modelmeta().custom_metadata_map
    metadata = {key: json.loads(value) for key, value in properties.items()}
    assert metadata["classes"] == list(toy.CLASSES) and metadata["std"][0] == 1.0
    image = np.random.default_rng(0).normal(size=(1, 3, 96, 96)).astype("f4")
    outputs = session.run(None, {session.get_inputs()[0].name: image})
    example = runpy.run_path(str(EXAMPLES / "detect_onnx.py"))
    boxes, scores, labels = example["decode"](outputs, metadata, (96, 96), 0.3, 0.45)

    found = [[torch.from_numpy(output) for output in part] for part in (outputs[:4], outputs[4:])]
    meta = [dict(img_shape=(96, 96), scale_factor=(1, 1))]
    options = ConfigDict(
        nms_pre=10_000,
        nms=dict(type="nms", iou_threshold=0.45),
        min_bbox_size=-1,
        score_thr=0.3,
        max_per_img=10_000,
    )
    (expected,) = model.bbox_head.predict_by_feat(*found, batch_img_metas=meta, cfg=options)
    assert len(expected) == len(boxes) > 10
    assert expected.labels.tolist() == labels.tolist()
    assert np.allclose(expected.scores, scores, atol=1e-6)
    assert np.allclose(expected.bboxes, boxes, atol=1e-3)

    picture = tmp_path / "picture.png"
    Image.fromarray((40 * image[0].transpose(1, 2, 0) + 120).clip(0, 255).astype("u1")).save(
        picture
    )
    example["main"](out, str(picture))
    assert capsys.readouterr().out.partition(" ")[0] in toy.CLASSES


def test_the_example_says_how_it_is_called(monkeypatch):
    monkeypatch.setattr("sys.argv", ["detect_onnx.py", "model.onnx"])
    with pytest.raises(SystemExit, match=r"detect_onnx.py model.onnx image.jpg"):
        runpy.run_path(str(EXAMPLES / "detect_onnx.py"), run_name="__main__")


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="Sequential cannot be exported"):
        HeadOutputs(nn.Sequential())
