"""Masks that are kept for several steps, or drawn."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fst
from fst.layers import checks
from tests.cases import error
from tests.networks import (
    batch,
    identity_layer,
    masks_of_steps,
    optimizer_for,
    small_net,
    train,
)
from tests.strategy_settings import setting


@pytest.mark.parametrize("interval", [1, 3])
def test_tsm_refreshes_its_mask_every_interval_steps(interval):
    layer, unit = identity_layer(fst.get_strategy("tsm", interval=interval))
    masks = masks_of_steps(layer, unit, 8)
    for step in range(1, 8):
        same = torch.equal(masks[step], masks[step - 1])
        assert same == (step % interval != 0), step
    for mask in masks:
        assert (mask.reshape(2, 4, 8).sum(1) == 2).all()
        assert (mask.reshape(8, 2, 4).sum(2) == 2).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["asp", "srste", "fst"])
def test_a_kept_mask_is_chosen_anew_by_no_backend(strategy, dtype):
    """In 32 and 16 bits kernels choose masks of magnitudes, and this one is none."""
    layer, unit = identity_layer(strategy)
    layer, unit = layer[0].to(dtype).eval(), unit.to(dtype)
    kept = ~layer.rule_mask()
    layer.set_mask(kept)
    assert torch.equal(layer(unit)[:, :, 0, 0].T != 0, kept[:, :, 0, 0])
    assert torch.equal(layer.effective_weight(), layer.weight * kept)


def _look(layer):
    """Everything that only looks."""
    layer[0].output_mask()
    layer[0].effective_weight()
    fst.verify(layer)
    fst.sparsity_state(layer)
    fst.fold(layer)
    copy.deepcopy(layer)
    repr(layer)


@pytest.mark.parametrize("id", ["tsm", "srste-random", "srste"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("seed", [7, None])
def test_looking_at_a_layer_changes_nothing(id, grad, seed):
    row = setting(id)
    strategy = row.build(interval=3) if id == "tsm" else row.build()

    def run(between):
        torch.manual_seed(0)
        layer, unit = identity_layer(strategy)
        if seed is not None:
            fst.seed_random_rules(layer, seed)
        return masks_of_steps(layer, unit, 8, between(layer)), layer[0].weight.grad

    def look(layer):
        def between(step):
            with torch.set_grad_enabled(grad):
                _look(layer)

        return between

    masks, gradient = run(lambda layer: lambda step: None)
    watched, watched_gradient = run(look)
    for step in range(8):
        assert torch.equal(masks[step], watched[step]), step
    assert torch.equal(gradient, watched_gradient)


def test_evaluation_in_between_changes_no_refresh():
    def between(layer):
        def evaluate(step):
            layer.eval()
            with torch.no_grad():
                layer(torch.randn(2, 8, 3, 3, dtype=torch.float64))
            layer.train()

        return evaluate

    strategy = fst.get_strategy("tsm", interval=3)
    layer, unit = identity_layer(strategy)
    expected = masks_of_steps(layer, unit, 8)
    layer, unit = identity_layer(strategy)
    actual = masks_of_steps(layer, unit, 8, between(layer))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_within_a_step_keeps_the_mask(copied):
    """Weights that change between two calls of a step do not change it, in a copy neither."""
    layer, unit = identity_layer("tsm")
    layer(unit)
    mask = layer[0].state.kept_mask.clone()
    with torch.no_grad():
        layer[0].weight.copy_(torch.randn_like(layer[0].weight))
    other = copied(layer)
    for net in (layer, other):
        net(unit)
        assert torch.equal(net[0].state.kept_mask, mask)


def test_a_copy_of_a_parametrized_layer_is_a_layer_of_its_own():
    layer, unit = identity_layer("srste")
    torch.nn.utils.parametrizations.weight_norm(layer[0])
    with torch.no_grad(), fst.frozen(layer.eval()):
        layer(unit)
        other = copy.deepcopy(layer)
    with torch.no_grad():
        before = other(unit)
        other[0].parametrizations.weight.original0.mul_(5)
        assert error(other(unit), 5 * before) <= 1e-12
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.train()(unit).sum().backward()
    optimizer.step()
    assert other[0].state.step == 1 and layer[0].state.step == 0


def test_a_frozen_layer_may_be_called_without_end(monkeypatch):
    monkeypatch.setattr(checks, "MOST_CALLS", 3)
    net = small_net()
    fst.convert(net, "resprop")
    net[0].requires_grad_(False)
    train(net, optimizer_for(net, 0.1), range(5))
    assert net[2].state.step == 5
    with pytest.raises(RuntimeError, match="'2' was called 3 times"):
        for step in range(4):
            net(batch(step))


def test_random_masks_follow_seed_layer_and_step():
    def masks(seed, rank=0, steps=3):
        layer, unit = identity_layer(setting("srste-random").build())
        fst.seed_random_rules(layer, seed, rank)
        torch.manual_seed(torch.seed())  # the global generator does not matter
        return masks_of_steps(layer, unit, steps)

    first = masks(1)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, masks(1, rank=3), strict=True))
    assert not torch.equal(first[0], first[1]), "a new draw at each step"
    assert not torch.equal(first[0], masks(2)[0])
    net = nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(2)))
    fst.convert(net, setting("srste-random").build())
    fst.seed_random_rules(net, 1)
    net(torch.randn(1, 16, 1, 1))
    assert not torch.equal(net[0].output_mask(), net[1].output_mask()), "each layer its own"


def test_seeded_rules_without_data():
    with torch.device("meta"):
        layer, images = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 8, 8)
    fst.convert(layer, setting("srste-random").build())
    fst.seed_random_rules(layer, 1)
    layer(images).sum().backward()
    assert layer.weight.grad.device.type == "meta"


@pytest.mark.parametrize("wrong", [None, 1.5, "1", True])
def test_a_seed_is_an_integer(wrong):
    net = small_net()
    fst.convert(net, "sampled")
    with pytest.raises(TypeError, match=f"seed={wrong!r} must be an integer"):
        fst.seed_random_rules(net, wrong)
    with pytest.raises(TypeError, match=f"rank={wrong!r} must be an integer"):
        fst.seed_random_rules(net, 1, wrong)
    fst.seed_random_rules(net, torch.tensor(3))  # of any kind, and the same draws
    assert net[0].state.seed == (3, 0) and type(net[0].state.seed[0]) is int


def test_a_process_that_resumes_keeps_its_rank():
    net, other = small_net(), small_net()
    for one in (net, other):
        fst.convert(one, "sampled")
    fst.seed_random_rules(net, 3, rank=0)
    fst.seed_random_rules(other, 4, rank=1)
    fst.load_sparsity_state(other, fst.sparsity_state(net))
    assert other[0].state.seed == (3, 1)
    fst.seed_random_rules(other, 4, rank=1)
    fst.load_sparsity_state(net, fst.sparsity_state(other))
    assert net[0].state.seed == (4, 0)


def test_random_gradient_masks_differ_between_ranks_and_calls():
    def masks(rank):
        torch.manual_seed(0)
        layer = nn.Conv2d(8, 8, 1, bias=False).double()
        fst.convert(layer, setting("sdgp-random").build())
        fst.seed_random_rules(layer, 1, rank)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(8)[:, :, None, None])
        inputs = [torch.zeros(4, 8, 3, 3, dtype=torch.float64, requires_grad=True) for _ in "ab"]
        sum(layer(x).sum() for x in inputs).backward()
        return [x.grad != 0 for x in inputs]

    first = masks(0)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(0), strict=True))
    assert not torch.equal(first[0], first[1]), "two calls in a step"
    assert not torch.equal(first[0], masks(1)[0]), "two ranks"
