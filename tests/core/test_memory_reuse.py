"""S(W) is written into the memory of the step before, but never under a pending backward pass."""

import copy

import pytest
import torch
from torch import nn

import fst


def _layer(strategy="fst"):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    fst.convert(layer, strategy)
    return layer


def _change(layer):
    with torch.no_grad():
        layer.weight.mul_(-1.5).add_(0.1)


def test_the_memory_is_used_again():
    layer, images = _layer(), torch.randn(2, 8, 6, 6)
    places = []
    for _ in range(3):
        output = layer(images)
        places.append({t.data_ptr() for t in layer._current(torch.float32)[:2]})
        output.sum().backward()
        _change(layer)
    assert len(places[0]) == 2 and places[0] == places[1] == places[2]


def test_passes_in_flight_of_the_same_weight_are_untouched():
    """Forward, forward, backward, forward, backward, backward: as pipelines do."""
    images = [torch.randn(2, 8, 6, 6) for _ in range(3)]
    layer = _layer()
    expected = []
    for batch in images:
        plain = copy.deepcopy(layer)
        batch = batch.clone().requires_grad_()
        plain(batch).square().sum().backward()
        expected.append(batch.grad)
    leaves = [batch.clone().requires_grad_() for batch in images]
    first, second = layer(leaves[0]).square().sum(), layer(leaves[1]).square().sum()
    first.backward()
    third = layer(leaves[2]).square().sum()
    second.backward()
    third.backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_a_pass_of_an_older_weight_is_refused():
    """As torch does for a dense layer whose weight was changed in place."""
    layer = _layer()
    images = torch.randn(2, 8, 6, 6, requires_grad=True)
    old = layer(images).sum()
    _change(layer)
    layer(images).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@pytest.mark.parametrize("other", ["dense", "srste", "sdgp", "tsm"])
def test_another_strategy_never_writes_into_the_weight(other):
    layer, images = _layer(other), torch.randn(2, 8, 6, 6)
    layer(images).sum().backward()
    layer.strategy = fst.get_strategy("fst")
    _change(layer)
    before = layer.weight.detach().clone()
    for _ in range(2):
        layer(images).sum().backward()
        layer.forget_pruned()
    assert torch.equal(layer.weight, before)


def test_inference_mode_and_training_alternate():
    layer, images = _layer(), torch.randn(2, 8, 6, 6)
    for _ in range(3):
        with torch.inference_mode():
            layer.eval()(images)
        layer.train()(images).sum().backward()
        _change(layer)
