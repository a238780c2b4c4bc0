"""mmdet's faults are mended."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmdet.evaluation.functional import eval_map
from mmdet.models.dense_heads import RPNHead, SSDHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.config import ConfigDict
from torchvision.ops import roi_align


@pytest.mark.usefixtures("mmdet_scope")
def test_ssd_predicts():
    head = SSDHead(
        num_classes=3,
        in_channels=(8,),
        anchor_generator=dict(
            type="SSDAnchorGenerator",
            scale_major=False,
            input_size=64,
            strides=[8],
            ratios=[[2]],
            min_sizes=[10],
            max_sizes=[20],
        ),
        bbox_coder=dict(type="DeltaXYWHBBoxCoder"),
    )
    test_cfg = ConfigDict(
        nms_pre=50, nms=dict(type="nms", iou_threshold=0.45), score_thr=0.02, max_per_img=10
    )
    meta = {"img_shape": (64, 64), "scale_factor": (1.0, 1.0)}
    outputs = head([torch.randn(1, 8, 8, 8)])
    (found,) = head.predict_by_feat(*outputs, batch_img_metas=[meta], cfg=test_cfg)
    assert 0 < len(found.bboxes) <= 10


@pytest.mark.usefixtures("mmdet_scope", "stand_in")  # compiled NMS has no bfloat16
def test_anchors_keep_their_place_in_bfloat16():
    """Regions proposed where the outputs are 0 are the anchors."""
    anchors = {"type": "AnchorGenerator", "scales": [3.3], "ratios": [1.0], "strides": [4]}
    test_cfg = {"nms_pre": 400, "max_per_img": 400, "nms": {"type": "nms", "iou_threshold": 1.0}}
    head = RPNHead(in_channels=1, anchor_generator=anchors, test_cfg=ConfigDict(test_cfg))
    (expected,) = head.prior_generator.grid_priors([(1, 255)], device="cpu")
    expected = expected[2:-2]  # those within the image
    outputs = torch.zeros(1, 1, 1, 255).bfloat16(), torch.zeros(1, 4, 1, 255).bfloat16()

    def error_in_pixels(predict):
        meta = {"img_shape": (800, 1020)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (found,) = predict(head, *([x] for x in outputs), batch_img_metas=[meta])
        edges = found.bboxes[:, 0].float()
        return float((edges[:, None] - expected[:, 0]).abs().min(0).values.max())

    assert error_in_pixels(BaseDenseHead.predict_by_feat.__wrapped__) > 1
    assert error_in_pixels(BaseDenseHead.predict_by_feat) < 1e-3


# 41 pixels wide; bfloat16 has multiples of 4 there, so its left edge would move by 1.3 pixels
ROI = torch.tensor([[0.0, 981.3, 4.0, 1022.3, 28.0]])


@pytest.mark.usefixtures("stand_in")  # mmcv's compiled RoIAlign has no bfloat16 on the CPU
def test_regions_keep_their_place_in_bfloat16():
    """The features' value is the distance in cells from column 250: small, so exact."""
    ramp = (torch.arange(320.0) - 250).clamp(-16, 16).expand(1, 1, 8, 320).contiguous()
    features = ramp.bfloat16().requires_grad_()
    exact = roi_align(ramp.double(), ROI.double(), (7, 7), 0.25, 2, True)
    layer = {"type": "RoIAlign", "output_size": 7, "sampling_ratio": 2}
    extractor = SingleRoIExtractor(layer, 1, [4])

    def error_in_pixels(pooled):
        return 4 * float((pooled.detach().double() - exact).abs().max())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        mended = extractor((features,), ROI)
        unmended = SingleRoIExtractor.forward.__wrapped__(extractor, (features,), ROI)
    assert error_in_pixels(unmended) > 1 and error_in_pixels(mended) < 1e-3
    mended.sum().backward()
    assert features.grad.dtype == torch.bfloat16 and features.grad.sum() == 49


def test_average_precision_forks_no_process(monkeypatch):
    def fork():
        raise AssertionError("a process with threads must not be forked")

    monkeypatch.setattr(os, "fork", fork)
    boxes = np.array([[0, 0, 10, 10], [20, 20, 40, 50]], dtype=np.float32)
    scored = np.c_[boxes, [0.9, 0.8]].astype(np.float32)
    missed = np.array([[60, 60, 70, 70, 0.95]], dtype=np.float32)
    labels = {"bboxes": boxes, "labels": np.array([0, 0])}
    mean, _ = eval_map([[scored], [missed]], [labels, labels], logger="silent")
    # of four objects two are found, after one false alarm: precision 2/3 up to recall 1/2
    assert mean == pytest.approx(1 / 2 * 2 / 3)


@pytest.mark.system
def test_importing_detection_prints_nothing():
    """mmdet says of a data set that nobody uses that it cannot be imported, twice."""
    command = [sys.executable, "-W", "ignore", "-c", "import fst.training.detection"]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
