"""One pruning launch per network: what joins it, and that results are those of single layers."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import fst
from fst.attach import set_grad_scaler
from tests.core.networks import batch, small_net


def _net(strategy="fst", channels_last=False, convert=True):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 1),
        nn.Flatten(),
        nn.Linear(72, 4),
    )
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    if convert:
        fst.convert(net, strategy, include=[nn.Conv2d, nn.Linear])
    return net


def _images(seed=0):
    return batch(seed, dtype=torch.float32)


def _train(net, steps=4, lr=0.1):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    attachment = fst.attach(net, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        net(_images(step)).square().sum().mul(1e-3).backward()
        optimizer.step()
    attachment.remove()
    return [p.detach().clone() for p in net.parameters()]


def _layers(net):
    return list(fst.sparse_layers(net).values())


def _pointers(net):
    return [layer.weight.data_ptr() for layer in _layers(net)]


SEVERAL = (
    fst.get_strategy("fst"),
    fst.get_strategy("fst", n=2, m=8, decay_mode="decoupled"),
    fst.get_strategy("srste", decay=0.1),
    fst.get_strategy("srste", decay=0.1, backward="pruned"),
    fst.Strategy("transposed-only", grad_input=fst.NM("weight", 1, 4)),
    fst.get_strategy("sdgp", prune_weight=True),
)


@pytest.mark.parametrize("strategy", SEVERAL, ids=lambda s: s.name)
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_is_that_of_single_layers(kernel, strategy, channels_last):
    torch.manual_seed(1)
    with fst.backends.force(prune_weight="torch"):
        expected = _train(_net(strategy, channels_last))
    assert not kernel.calls
    net = _net(strategy, channels_last)
    torch.manual_seed(1)
    actual = _train(net)
    decoupled = strategy.decay > strategy.gradient_decay  # needs masks again
    assert [len(call) for call in kernel.calls] == [4] * (8 if decoupled else 4)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)
    assert bool(kernel.decays) == bool(strategy.gradient_decay)


def test_results_lie_where_they_did(kernel):
    net, places = _net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        output = net(_images(step))
        known = [layer.pruned.of(layer.weight)[torch.float32] for layer in _layers(net)]
        places.append([tensor.data_ptr() for pruned in known for tensor in pruned])
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(places[0])) == 12 and places[0] == places[1] == places[2]


def test_passes_in_flight_are_untouched(kernel):
    images = [_images(seed) for seed in range(3)]
    net, expected = _net(), []
    for image in images:
        image = image.clone().requires_grad_()
        copy.deepcopy(net)(image).square().sum().backward()
        expected.append(image.grad)
    leaves = [image.clone().requires_grad_() for image in images]
    first, second = net(leaves[0]).square().sum(), net(leaves[1]).square().sum()
    first.backward()
    third = net(leaves[2]).square().sum()
    second.backward()
    third.backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_a_pass_of_an_older_weight_is_refused(kernel):
    net = _net()
    images = _images().requires_grad_()
    old = net(images).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-1.5)
    net(images).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_copies_and_pickles_are_networks_of_their_own(kernel):
    net = _net()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [copy.deepcopy(net), torch.load(file, weights_only=False)]
    copies.append(pickle.loads(pickle.dumps(net)))
    for other in copies:
        kernel.calls.clear()
        assert torch.equal(other(_images()), net(_images()))
        assert [sorted(call) for call in kernel.calls] == [
            sorted(_pointers(other)),
            *([sorted(_pointers(net))] if other is copies[0] else []),
        ]
    assert len({id(_layers(model)[0].network) for model in (net, *copies)}) == 4
    for model in (net, *copies):
        assert len({id(layer.network) for layer in _layers(model)}) == 1


def test_a_network_keeps_no_layer_alive(kernel):
    net = _net()
    head, network = weakref.ref(net[5]), net[5].network
    net(_images())
    net[5] = nn.Identity()
    assert head() is None
    kernel.calls.clear()
    net.train()(_images())
    assert [len(call) for call in kernel.calls] == [3] and len(network._layers) == 3


def test_two_conversions_are_two_networks(kernel):
    net = _net(convert=False)
    fst.convert(net, "fst", include="0")
    fst.convert(net, "fst", exclude="5")
    net(_images())
    assert [len(call) for call in kernel.calls] == [1, 2]


def test_a_folded_layer_has_left(kernel):
    net = _net()
    fst.fold(net)  # a copy
    net(_images())
    layer = net[2]
    layer.densify(layer.effective_weight())
    kernel.calls.clear()
    net.train()(_images())
    assert type(layer) is nn.Conv2d and [len(call) for call in kernel.calls] == [3]


def test_each_dtype_has_its_own_launch(kernel):
    """Half of the layers run in bfloat16; after the first pass nothing is pruned in vain."""
    net = _net()

    def forward(images):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = net[2](net[:2](images))
        return net[4:](net[3](hidden.float()))

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        kernel.calls.clear()
        forward(_images(step)).sum().backward()
        optimizer.step()
    assert [len(call) for call in kernel.calls] == [2, 2]
    known = [list(layer.pruned.of(layer.weight)) for layer in _layers(net)]
    forward(_images())
    known = [list(layer.pruned.of(layer.weight)) for layer in _layers(net)]
    assert known == [[torch.bfloat16], [torch.bfloat16], [torch.float32], [torch.float32]]


def test_what_cannot_join_is_pruned_by_itself(kernel):
    """Another strategy, a kept mask, a tensor that is no parameter."""
    net = _net()
    net[2].strategy = fst.get_strategy("fst", n=1, m=4)
    weight = net[3].weight
    del net[3].weight
    net[3].weight = weight * 1.0
    net(_images()).sum().backward()
    pointers = [net[0], net[2], net[3], net[5]]
    pointers = [layer.weight.data_ptr() for layer in pointers]
    assert kernel.calls == [[pointers[0], pointers[3]], [pointers[1]], [pointers[2]]]


def test_a_kept_mask_stays_out_of_the_launch(kernel):
    net = _net()
    net[2].keep(torch.ones(8, 4, 3, 3, dtype=torch.bool))
    net[:2](_images())
    assert len(kernel.calls[0]) == 3
    with pytest.raises(RuntimeError, match="forced but cannot compute"):
        net(_images())
    with fst.backends.force(prune_weight="torch"):
        net(_images())


def test_a_layer_that_is_not_called_is_pruned_once_and_never_too_old(kernel):
    """Its weight is changed behind autograd's back, as some optimizers do, in a step without it."""
    net, unused = _net(), None
    optimizer = torch.optim.SGD(net[:4].parameters(), lr=0.1)
    unused = net[5]
    sizes = []
    for step in range(3):
        kernel.calls.clear()
        net[:4](_images(step)).sum().backward()
        optimizer.step()
        unused.weight.data.mul_(-2).add_(0.3)  # neither version nor address tells
        sizes += [len(call) for call in kernel.calls]
    assert sizes == [4, 3, 3]
    hidden = torch.randn(2, 72)
    expected = nn.functional.linear(hidden, copy.deepcopy(unused).effective_weight(), unused.bias)
    torch.testing.assert_close(unused(hidden), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_changed_weights_are_seen(kernel, grad):
    """In place, exchanged through .data, behind train() and eval(), and shared ones."""
    net = _net()
    net[3].weight = net[3].weight
    with torch.set_grad_enabled(grad):
        net(_images())
        for change in (
            lambda w: w.detach().mul_(-1.5),
            lambda w: setattr(w, "data", torch.randn_like(w)),
            lambda w: (w.data.mul_(-2), net.eval()),
            lambda w: (w.data.add_(0.1), net.train()),
        ):
            for layer in _layers(net):
                change(layer.weight)
            with fst.backends.force(prune_weight="torch"):
                expected = copy.deepcopy(net)(_images())
            assert torch.equal(net(_images()), expected)


def test_shared_weights(kernel):
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    net[1].weight = net[0].weight
    fst.convert(net, fst.get_strategy("fst", decay=0.1))
    other = copy.deepcopy(net)
    images = torch.randn(2, 8, 5, 5)
    with fst.backends.force(prune_weight="torch"):
        other(images).sum().backward()
    net(images).sum().backward()
    assert [len(call) for call in kernel.calls] == [2] and len(kernel.decays) == 1
    torch.testing.assert_close(net[0].weight.grad, other[0].weight.grad)


def test_inference_tensors(kernel):
    with torch.inference_mode():
        net = _net()
        first = net(_images())
        for layer in _layers(net):
            layer.weight.mul_(-1)
            layer.bias.mul_(-1)
        assert torch.equal(net[0](_images()), -copy.deepcopy(_net())[0](_images()))
        assert not torch.equal(net(_images()), first)
    assert all(len(call) == 1 for call in kernel.calls[:4])


def test_inference_mode_and_training_alternate(kernel):
    net = _net()
    for step in range(3):
        with torch.inference_mode():
            net.eval()(_images())
        net.train()(_images(step)).sum().backward()


def test_masks_that_were_given_out_stay(kernel):
    net = _net()
    net(_images())
    mask = net[0].output_mask()
    before = mask.clone()
    for layer in _layers(net):
        layer.weight.data.mul_(torch.randn_like(layer.weight))
        layer.weight.detach().add_(0)
    net(_images())
    assert torch.equal(mask, before) and not torch.equal(net[0].output_mask(), before)


def test_decay_that_is_scaled_or_odd_stays_with_torch(kernel):
    net = _net(fst.get_strategy("srste", decay=0.5))
    set_grad_scaler(net, torch.amp.GradScaler("cpu", init_scale=4.0))
    net(_images()).sum().backward()
    assert not kernel.decays
    other = _net(fst.get_strategy("srste", decay=2.0))
    other(_images()).sum().backward()
    assert len(kernel.decays) == 4
    for a, b in zip(_layers(net), _layers(other), strict=True):
        torch.testing.assert_close(a.weight.grad, b.weight.grad)


def test_reports_say_what_was_launched_together(kernel):
    net = _net()
    net(_images())
    reasons = [layer.run.decisions["prune_weight"].reason for layer in _layers(net)]
    assert reasons == ["forced"] + ["in one launch with layer '0'"] * 3


def test_replicas_of_data_parallel_know_nothing():
    net = small_net(double=False)
    fst.convert(net, "fst")
    net(_images())
    replica = net[0]._replicate_for_data_parallel()
    replica.weight = net[0].weight
    assert not replica.pruned.of(replica.weight) and net[0].pruned.of(net[0].weight)
    assert replica.network is not net[0].network
