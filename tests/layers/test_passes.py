"""S(W) lives as long as the calls that use it: passes in flight keep theirs."""

import copy
import weakref

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


def test_nothing_is_kept_of_a_weight():
    layer, images = _layer(), torch.randn(2, 8, 6, 6)
    output = layer(images)
    kept = [weakref.ref(saved) for saved in output.grad_fn.saved_tensors if saved is not None]
    del output, images
    assert all(ref() is None or ref() is layer.weight for ref in kept)
    state = (*vars(layer.state).values(), *vars(layer.transient).values())
    assert not any(isinstance(value, torch.Tensor) for value in state)
    weight, _, mask = layer.transient.decay_mask  # of this step
    assert weight is layer.weight and mask.dtype == torch.bool
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer.transient.decay_mask is None


def test_inference_mode_and_training_alternate():
    layer, images = _layer(), torch.randn(2, 8, 6, 6)
    for _ in range(3):
        with torch.inference_mode():
            layer.eval()(images)
        layer.train()(images).sum().backward()
        _change(layer)
