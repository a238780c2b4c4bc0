"""mmdet's faults are mended, in its classes and nowhere else."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmdet.evaluation.functional import eval_map
from mmdet.models.dense_heads import RetinaHead, RPNHead, SSDHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.config import ConfigDict
from torch import nn

from fst.training.detection import fixes
from tests.training.detection import references

SSD = {
    "num_classes": 3,
    "in_channels": (8, 8),
    "anchor_generator": {
        "type": "SSDAnchorGenerator",
        "scale_major": False,
        "input_size": 64,
        "strides": [8, 16],
        "ratios": [[2], [2]],
        "min_sizes": [10, 20],
        "max_sizes": [20, 40],
    },
    "bbox_coder": {"type": "DeltaXYWHBBoxCoder"},
    "test_cfg": {
        "nms_pre": 50,
        "nms": {"type": "nms", "iou_threshold": 0.45},
        "score_thr": 0.02,
        "max_per_img": 10,
        "min_bbox_size": 0,
    },
}


def ssd_arguments():
    return ConfigDict(copy.deepcopy(SSD))


@pytest.mark.usefixtures("mmdet_scope")
class TestSSDHead:
    def test_predicts(self):
        head = SSDHead(**ssd_arguments())
        features = [torch.randn(1, 8, 8, 8), torch.randn(1, 8, 4, 4)]
        meta = {"img_shape": (64, 64), "scale_factor": (1.0, 1.0)}
        (found,) = head.predict_by_feat(*head(features), batch_img_metas=[meta])
        assert 0 < len(found.bboxes) <= 10
        assert head.loss_cls is None
        assert not any("loss_cls" in name for name in head.state_dict())

    def test_a_subclass_keeps_its_own_loss(self):
        class Own(SSDHead):
            def __init__(self, **arguments):
                super().__init__(**arguments)
                self.loss_cls = nn.CrossEntropyLoss(weight=torch.ones(4))

        head = Own(**ssd_arguments())
        assert isinstance(head.loss_cls, nn.CrossEntropyLoss)
        assert "loss_cls.weight" in head.state_dict()

    def test_a_loss_that_is_there_stays(self, monkeypatch):
        original = SSDHead.__init__.__wrapped__

        def __init__(self, **arguments):
            original(self, **arguments)
            self.loss_cls = nn.CrossEntropyLoss()

        monkeypatch.setattr(SSDHead, "__init__", __init__)
        fixes.apply()
        assert isinstance(SSDHead(**ssd_arguments()).loss_cls, nn.CrossEntropyLoss)

    def test_other_heads_are_as_they_were(self):
        assert not hasattr(RetinaHead.__init__, fixes._MARK)


def test_applying_twice_changes_nothing():
    def methods():
        return SSDHead.__init__, BaseDenseHead.predict_by_feat, SingleRoIExtractor.forward

    before = methods()
    fixes.apply()
    assert before == methods()


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


def extractor(levels=1):
    layer = {"type": "RoIAlign", "output_size": 7, "sampling_ratio": 2}
    return SingleRoIExtractor(layer, 1, [4 * 2**level for level in range(levels)])


def ramp(dtype):
    """(1, 1, 8, 320): its value is the distance in cells from column 250: small, so exact."""
    columns = (torch.arange(320.0) - 250).clamp(-16, 16)
    return columns.expand(1, 1, 8, 320).to(dtype).contiguous()


# 41 pixels wide; bfloat16 has multiples of 4 there, so its left edge would move by 1.3 pixels
ROI = torch.tensor([[0.0, 981.3, 4.0, 1022.3, 28.0]])


@pytest.mark.usefixtures("stand_in")  # mmcv's compiled RoIAlign has no bfloat16 on the CPU
@pytest.mark.parametrize("autocast", [True, False])
def test_regions_keep_their_place_in_bfloat16(autocast):
    features = ramp(torch.bfloat16).requires_grad_()
    exact = references.roi_align(ramp(torch.float64), ROI.double(), (7, 7), 0.25, 2, True)

    def error_in_pixels(pooled):
        return 4 * float((pooled.detach().double() - exact).abs().max())

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        mended = extractor()((features,), ROI)
        unmended = SingleRoIExtractor.forward.__wrapped__(extractor(), (features,), ROI)
    assert mended.dtype == unmended.dtype == torch.bfloat16
    assert error_in_pixels(unmended) > 1
    assert error_in_pixels(mended) < 4 * 2**-8 * 8  # half a unit in the last place of values < 8
    mended.sum().backward()
    assert features.grad.dtype == torch.bfloat16 and features.grad.sum() == 49


def test_regions_go_to_the_right_level_in_bfloat16():
    rois = torch.tensor([[0, 0.0, 0.0, w, w] for w in (111.8, 112.2, 223.9, 224.1, 500.0)])
    levels = [torch.full((1, 1, 128 // 2**i, 128 // 2**i), float(i + 1)) for i in range(4)]
    expected = extractor(4)(tuple(levels), rois).flatten(1).mean(1).tolist()
    pooled = extractor(4)(tuple(level.bfloat16() for level in levels), rois)
    assert pooled.flatten(1).float().mean(1).tolist() == expected == [1, 2, 2, 3, 4]


def test_float32_is_left_alone():
    rois = torch.tensor([[0.0, 3.3, 4.0, 40.7, 28.0]])
    ours = extractor()((ramp(torch.float32),), rois)
    theirs = SingleRoIExtractor.forward.__wrapped__(extractor(), (ramp(torch.float32),), rois)
    assert torch.equal(ours, theirs)


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
    done = subprocess.run(
        [sys.executable, "-c", "import fst.training.detection"], capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
