"""A converted model becomes the dense one again in the middle of its training."""

import copy

import pytest
import torch
from torch import nn

import fst
from tests.networks import TRAINED, attach, batch, optimizer_for, small_net, train


@pytest.mark.parametrize("row", TRAINED)
def test_training_goes_on_as_that_of_a_dense_model_with_the_same_momentum(row):
    """Bit for bit: no mask, no decay and no schedule acts on it any more."""
    net = small_net()
    fst.convert(net, row.build())
    parameters = list(net.parameters())
    optimizer = optimizer_for(net, lr=0.05, momentum=0.9)
    attach(net, optimizer)
    train(net, optimizer, range(3))
    before = copy.deepcopy(net.state_dict())
    fst.unconvert(net)
    assert [type(layer) for layer in net] == [type(layer) for layer in small_net()]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    if not row.build().replaces_parameters:
        assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    dense = copy.deepcopy(net)
    other = type(optimizer)(dense.parameters(), lr=0.05)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, range(3, 7))
    train(dense, other, range(3, 7))
    assert all(map(torch.equal, net.parameters(), dense.parameters()))


def test_it_can_be_converted_again_and_decays_once():
    net, other = small_net(), small_net()
    fst.convert(net, "srste", decay=0.5)
    fst.unconvert(net)
    for model in (net, other):
        fst.convert(model, "srste", decay=0.5)
        train(model, optimizer_for(model, lr=0.1), range(3))
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_a_block_of_frozen_may_end_after_it():
    net = small_net()
    fst.convert(net, "srste")
    with fst.frozen(net), torch.no_grad():
        net(batch())
        fst.unconvert(net)
        dense = net(batch())
    assert torch.equal(dense, net(batch())) and not fst.verify(net).ok


def test_layers_of_a_library_become_their_own_class_again():
    layers = pytest.importorskip("timm.layers")
    net = nn.Sequential(layers.StdConv2d(8, 8, 3))
    before = copy.deepcopy(net)
    fst.convert(net, "srste")
    fst.unconvert(net)
    images = torch.randn(2, 8, 6, 6)
    assert type(net[0]) is layers.StdConv2d and torch.equal(net(images), before(images))


def test_what_cannot_be_undone_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.raises(ValueError, match="has no converted layer"):
        fst.unconvert(net)
    with pytest.raises(TypeError, match="model is a str"):
        fst.unconvert("net")
    fst.convert(net, "srste")
    nn.utils.parametrizations.weight_norm(net[1])
    with pytest.raises(ValueError, match="layer '1' became a ParametrizedSparseConv2d"):
        fst.unconvert(net)
    assert len(fst.sparse_layers(net)) == 2
    nn.utils.parametrize.remove_parametrizations(net[1], "weight")
    fst.unconvert(net)
    assert type(net[1]) is nn.Conv2d
