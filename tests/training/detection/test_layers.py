"""Detectors freeze converted layers, share them over levels, and shrink their maps to a pixel."""

from collections import Counter

import pytest
import torch
from mmdet.models.backbones import ResNet
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.models.necks import SSDNeck
from torch.autograd.graph import saved_tensors_hooks

import fst
import fst.layers.weights
from tests.networks import stepped_gradients

STRATEGIES = ("dense", "fst", "sdgp", "srste")
DECAY = 0.5


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_layer_within_passes_gradients_on_and_keeps_no_input(strategy):
    layer = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1))
    fst.convert(layer, strategy)
    layer[0].weight.requires_grad_(False)
    kept = []
    x = torch.randn(2, 8, 12, 12, requires_grad=True)

    def record(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        y = layer(x)
    assert x.untyped_storage().data_ptr() not in kept
    gradient = torch.randn(y.shape)
    y.backward(gradient)
    assert x.grad.abs().sum() > 0 and layer[0].weight.grad is None
    # the same grad_input as with a weight that is trained
    layer[0].weight.requires_grad_()
    again = x.detach().clone().requires_grad_()
    layer(again).backward(gradient)
    assert torch.equal(again.grad, x.grad)


def rpn():
    return RPNHead(
        in_channels=16,
        feat_channels=16,
        anchor_generator={
            "type": "mmdet.AnchorGenerator",
            "scales": [4],
            "ratios": [1.0],
            "strides": [4, 8, 16, 32, 64],
        },
    )


def retina():
    return RetinaHead(num_classes=3, in_channels=16, feat_channels=16, stacked_convs=2)


@pytest.fixture
def levels():
    torch.manual_seed(1)
    sizes = ((24, 32), (12, 16), (6, 8), (3, 4), (2, 2))
    return [torch.randn(2, 16, *size) for size in sizes]


@pytest.fixture
def prunings(monkeypatch):
    """Counts the prunings of each weight."""
    counts = Counter()
    original = fst.layers.weights.prune_weight

    def count(weight, *args, **kwargs):
        counts[weight.data_ptr()] += 1
        return original(weight, *args, **kwargs)

    monkeypatch.setattr(fst.layers.weights, "prune_weight", count)
    return counts


def total(outputs):
    return (
        sum(map(total, outputs)) if isinstance(outputs, (list, tuple)) else outputs.square().sum()
    )


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("build", [rpn, retina], ids=["rpn", "retina"])
@pytest.mark.parametrize("strategy", ["fst", "srste"])
def test_a_head_shared_by_levels_is_pruned_for_each_and_decays_once_a_step(
    build, strategy, levels, prunings
):
    heads = [build() for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    for head, decay in zip(heads, (0.0, DECAY), strict=True):
        fst.convert(head, fst.get_strategy(strategy, decay=decay))
    for _ in range(2):
        prunings.clear()
        for head in heads:
            total(head(levels)).backward()
            stepped_gradients(head)
        weights = [x.weight for head in heads for x in fst.sparse_layers(head).values()]
        assert prunings == {weight.data_ptr(): len(levels) for weight in weights}
        layers = [fst.sparse_layers(head) for head in heads]
        for name, plain in layers[0].items():
            decayed = layers[1][name]
            with torch.no_grad():
                expected = plain.weight.grad + DECAY * (plain.weight - plain.effective_weight())
            torch.testing.assert_close(decayed.weight.grad, expected, rtol=1e-4, atol=1e-4)
            assert decayed.state.step == plain.state.step > 0
        with torch.no_grad():  # the next step, from the same weights
            for layer, other in zip(layers[0].values(), layers[1].values(), strict=True):
                layer.weight.sub_(layer.weight.grad, alpha=1e-3)
                other.weight.copy_(layer.weight)
        for head in heads:
            head.zero_grad()


@pytest.fixture
def _scope():
    from mmengine.registry import DefaultScope

    with DefaultScope.overwrite_default_scope("mmdet"):
        yield


@pytest.mark.usefixtures("_scope")
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
