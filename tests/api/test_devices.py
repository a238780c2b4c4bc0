"""Models and tensors on another device; simulated, without a GPU."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fst
from fst.api.metrics import look
from fst.rules.nm import TwicePruned
from fst.rules.values import SoftThreshold


@pytest.fixture
def simulated():
    with FakeTensorMode():
        yield


@pytest.mark.parametrize(("before", "now"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.usefixtures("simulated")
class TestMoved:
    def test_the_factor_of_a_soft_threshold(self, before, now):
        weight = torch.empty(8, 8, 3, 3, device=now)
        rule = SoftThreshold("weight", 2, 4, factor=torch.empty((), device=before))
        assert rule.weight_values(weight, weight > 0, 1).device.type == now

    def test_the_order_of_double_pruning(self, before, now):
        rule = TwicePruned(n=2, m=4, order=torch.arange(8, device=before))
        mask = rule.weight_mask(torch.empty(8, 8, 3, 3, device=now), "grad_input", 1)
        assert mask.device.type == now

    def test_the_masks_that_metrics_saw(self, before, now):
        model = nn.Conv2d(8, 8, 3, device=before)
        fst.convert(model, "srste")
        masks, layers = {}, fst.sparse_layers(model)
        look(layers, masks)
        model.weight = nn.Parameter(torch.empty(8, 8, 3, 3, device=now))
        assert look(layers, masks)["mask_flip_rate", ""].device.type == now
