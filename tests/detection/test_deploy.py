"""Both detectors are exported up to their heads' outputs."""

import pytest
import torch
from torch import nn

import fst
from fst.detection.deploy import HeadOutputs
from fst.engine.config import load_config
from fst.engine.export import deployable
from fst.engine.model import build_model

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(("detector", "head"), [("ssd", "bbox_head"), ("faster-rcnn", "rpn_head")])
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


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="Sequential cannot be exported"):
        HeadOutputs(nn.Sequential())
