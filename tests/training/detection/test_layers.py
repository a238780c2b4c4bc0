"""Detectors freeze converted layers, and shrink their maps to a pixel."""

import pytest
import torch
from mmdet.models.backbones import ResNet
from mmdet.models.necks import SSDNeck
from torch.autograd.graph import saved_tensors_hooks

import fst

STRATEGIES = ("dense", "fst", "sdgp", "srste")


def backbone(strategy, **options):
    model = ResNet(18, base_channels=8, frozen_stages=1, norm_eval=True, **options)
    fst.convert(model, strategy, include="*")
    model.train()  # returns nothing
    return model


def is_frozen(name):
    return name.startswith(("conv1", "layer1"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_stages_have_neither_gradient_nor_decay(strategy):
    model = backbone(strategy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = {name: layer.weight.clone() for name, layer in fst.sparse_layers(model).items()}
    statistics = [m.running_mean.clone() for m in model.modules() if hasattr(m, "running_mean")]
    saved = []

    def record(tensor):
        saved.append(tensor)
        return tensor

    images = torch.randn(2, 3, 48, 64)
    with saved_tensors_hooks(record, lambda tensor: tensor):
        stem = model.maxpool(model.relu(model.norm1(model.conv1(images))))
        first = model.layer1(stem)
        assert not saved and not first.requires_grad
        outputs = model(images)
    assert saved
    sum(output.square().mean() for output in outputs).backward()
    optimizer.step()
    for name, layer in fst.sparse_layers(model).items():
        assert is_frozen(name) == (layer.weight.grad is None) == (layer.state.step == 0), name
        assert is_frozen(name) == torch.equal(layer.weight, before[name]), name
    after = [m.running_mean for m in model.modules() if hasattr(m, "running_mean")]
    assert all(map(torch.equal, statistics, after))


@pytest.mark.usefixtures("mmdet_scope")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_maps_of_one_pixel(strategy):
    """SSD300's neck ends in maps of 3 x 3 and 1 x 1: every weight is trained, none by NaN."""
    neck = SSDNeck(
        in_channels=(16, 32),
        out_channels=(16, 32, 32, 16, 16),
        level_strides=(2, 2, 1),
        level_paddings=(1, 1, 0),
    )
    report = fst.convert(neck, strategy)
    assert len(report.layers) == 6 and not report.skipped
    outputs = neck([torch.rand(2, 16, 20, 20), torch.rand(2, 32, 10, 10)])
    assert [tuple(y.shape[2:]) for y in outputs[2:]] == [(5, 5), (3, 3), (1, 1)]
    sum(y.sum() for y in outputs).backward()
    for name, layer in fst.sparse_layers(neck).items():
        assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.any(), name
