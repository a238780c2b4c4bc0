"""The defining property of each system that prunes weights between optimizer steps."""

import copy
import math

import pytest
import torch

import fst
from fst.baselines.asfp import asymptotic_rate
from fst.strategies.rigl import erk_densities
from tests.networks import attach, batch, small_net
from tests.oracle.conv import reference_nm_mask
from tests.strategies.weight_systems import (
    OPTIMIZERS,
    Training,
    assert_held_at_zero,
)

# ---------------------------------------------------------------- asp


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_asp_keeps_the_mask_of_the_first_weights_for_good(optimizer):
    training = Training("asp", optimizer)
    dense = [layer.weight.detach().clone() for layer in training.layers]
    training.steps(8)
    for layer, weight, mask in zip(training.layers, dense, training.masks(), strict=True):
        assert torch.equal(mask, reference_nm_mask(weight, 2, 4, 1))
        assert not torch.equal(layer.weight[mask], weight[mask])
    assert_held_at_zero(training)
    assert fst.verify(training.net).ok
    assert fst.verify(training.net.state_dict()).ok
    assert fst.verify(fst.fold(training.net)).ok


def test_asp_trains_the_masked_weights_alone():
    """Both GEMMs see M∘W, and the optimizer the masked gradient: as a loop written by hand."""
    training = Training("asp")
    by_hand = small_net()
    optimizer = OPTIMIZERS["sgd"](by_hand.parameters())
    masks = {i: reference_nm_mask(by_hand[i].weight, 2, 4, 1) for i in (0, 2)}
    with torch.no_grad():
        for i, mask in masks.items():
            by_hand[i].weight.mul_(mask)
    for step in range(4):
        training.step(step)
        optimizer.zero_grad()
        by_hand(batch(step)).square().mean().backward()
        for i, mask in masks.items():
            by_hand[i].weight.grad.mul_(mask)
        optimizer.step()
    for p, q in zip(training.net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_asp_takes_weights_that_are_loaded_after_attaching():
    training = Training("asp")
    training.net.eval()(batch())  # a look at the untrained model
    with torch.no_grad():
        trained = {k: torch.randn_like(v) for k, v in training.net.state_dict().items()}
    training.net.load_state_dict(trained)
    training.net.train()
    training.step(0)
    expected = reference_nm_mask(trained["2.weight"], 2, 4, 1)
    assert torch.equal(training.layers[1].state.kept_mask, expected)


def test_asp_keeps_the_zeros_of_a_model_that_was_pruned_before():
    training = Training("asp")
    layer = training.layers[1]
    with torch.no_grad():
        layer.weight[layer.weight.abs() < layer.weight.abs().quantile(0.7)] = 0
    dense = layer.weight.detach().clone()
    kept = reference_nm_mask(dense, 2, 4, 1)
    assert (kept & (dense == 0)).any(), "zeros that the pattern leaves room for"
    training.steps(3)
    assert torch.equal(layer.state.kept_mask, kept & (dense != 0))
    assert not layer.weight[dense == 0].any()
    assert_held_at_zero(training)
    assert fst.verify(training.net).ok and fst.verify(fst.fold(training.net)).ok


def test_asp_lets_a_layer_of_zeros_alone_learn():
    training = Training("asp")
    torch.nn.init.zeros_(training.layers[1].weight)
    training.steps(3)
    assert training.layers[1].state.kept_mask.float().mean() == 0.5
    assert training.layers[1].weight.any()


def test_asp_masks_a_momentum_that_was_there_before():
    training = Training("asp")
    momentum = torch.ones_like(training.layers[0].weight)
    training.optimizer.state[training.layers[0].weight]["momentum_buffer"] = momentum
    training.step(0)
    assert_held_at_zero(training)


# ---------------------------------------------------------------- asfp


@pytest.mark.parametrize("goal", [0.1, 0.3, 0.9])
def test_asfp_rate_passes_the_papers_points(goal):
    assert asymptotic_rate(goal, 0.0) == 0
    assert asymptotic_rate(goal, 1 / 8) == pytest.approx(0.75 * goal, rel=1e-12)
    assert asymptotic_rate(goal, 1.0) == pytest.approx(goal, rel=1e-12)
    assert asymptotic_rate(goal, 1.2) == asymptotic_rate(goal, 1.0)
    rates = [asymptotic_rate(goal, epoch / 40) for epoch in range(41)]
    steps = [b - a for a, b in zip(rates, rates[1:], strict=False)]
    assert all(step > 0 for step in steps) and steps == sorted(steps, reverse=True)
    ratios = [b / a for a, b in zip(steps, steps[1:], strict=False)]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-6)  # it is an exponential


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_asfp_zeroes_filters_after_each_epoch_and_they_come_back(optimizer):
    training = Training("asfp", optimizer, total=20, epoch=5, goal=0.5)
    revived = 0
    for step in range(1, 21):
        before = [(layer.weight == 0).flatten(1).all(1) for layer in training.layers]
        training.backward(step)
        plain = copy.deepcopy(training.net)  # what the step alone would make of it
        for p, q in zip(plain.parameters(), training.net.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer_state = copy.deepcopy(training.optimizer.state_dict())
        other = OPTIMIZERS[optimizer](plain.parameters())
        other.load_state_dict(optimizer_state)
        other.step()
        training.optimizer.step()
        for layer, name, zero in zip(training.layers, ("0", "2"), before, strict=True):
            expected = plain.get_submodule(name).weight.detach().clone()
            if step % 5 == 0:
                norms = expected.square().sum((1, 2, 3)).tolist()
                count = int(asymptotic_rate(0.5, step / 20) * 8 + 1e-12)
                for index in sorted(range(8), key=lambda i: norms[i])[:count]:
                    expected[index] = 0
                assert count >= 3 and int((expected.flatten(1) == 0).all(1).sum()) == count
            else:
                revived += int((zero & (layer.weight != 0).flatten(1).all(1)).sum())
            assert torch.equal(layer.weight, expected)
    assert revived > 0
    folded = fst.fold(training.net)
    assert [int((m.weight == 0).flatten(1).all(1).sum()) for m in (folded[0], folded[2])] == [4, 4]


def test_asfp_ends_with_the_goal_even_in_the_middle_of_an_epoch():
    training = Training("asfp", total=7, epoch=3.5, goal=0.5)
    zeros = []
    for step in range(9):
        training.step(step)
        zeros.append(int((training.layers[0].weight == 0).flatten(1).all(1).sum()))
    assert zeros == [0, 0, 0, 3, 0, 0, 4, 0, 0]
    training = Training("asfp", total=5, epoch=4, goal=0.5)
    training.steps(5)
    assert int((training.layers[0].weight == 0).flatten(1).all(1).sum()) == 4


def test_asfp_counts_epochs_of_a_fraction_of_a_step():
    """As where gradients accumulate over epochs: nine batches, seven to a step; 9 / (9/7) < 7."""
    training = Training("asfp", total=18, epoch=9 / 7)
    training.steps(9)
    assert training.layers[0].state.schedule_state["epochs"] == 7


def test_asfp_zeroes_filters_of_channels_last_weights():
    net = small_net().to(memory_format=torch.channels_last)
    fst.convert(net, fst.get_strategy("asfp", goal=0.5))
    attach(net, optimizer := torch.optim.SGD(net.parameters(), lr=0.05))
    for step in range(5):
        net(batch(step)).square().mean().backward()
        optimizer.step()
    assert int((net[0].weight == 0).flatten(1).all(1).sum()) == int(8 * asymptotic_rate(0.5, 1 / 4))
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- dpf


def _cubic(goal, step, length):
    return goal * (1 - max(0.0, 1 - step / length) ** 3)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_dpf_masks_follow_the_dense_weights_every_few_steps(allocation):
    training = Training("dpf", interval=3, allocation=allocation, sparsity=0.8)
    recovered, last = 0, None
    for step in range(1, 19):
        training.step(step)
        weights = [layer.weight.detach() for layer in training.layers]
        masks = training.masks()
        if step % 3 == 0:
            sparsity = _cubic(0.8, step, 15)
            sets = [weights] if allocation == "global" else [[w] for w in weights]
            expected = []
            for together in sets:
                values = sorted(v for w in together for v in w.abs().flatten().tolist())
                threshold = values[round(sparsity * len(values))]
                expected += [w.abs() >= threshold for w in together]
            assert all(torch.equal(m, e) for m, e in zip(masks, expected, strict=True)), step
        elif last is not None:
            assert all(torch.equal(m, e) for m, e in zip(masks, last, strict=True)), step
        if last is not None:
            recovered += sum(int((m & ~o).sum()) for m, o in zip(masks, last, strict=True))
        last = masks
    assert recovered > 0, "no pruned weight came back"
    assert sum(int(m.sum()) for m in masks) == pytest.approx(0.2 * 864, abs=2)


def test_dpf_applies_the_gradient_of_the_pruned_model_to_the_dense_weights():
    training = Training("dpf", ramp=0.0, interval=1)
    training.steps(2)
    layer = training.layers[1]
    pruned = ~layer.state.kept_mask
    assert pruned.any() and (layer.weight[pruned] != 0).all()
    masked = copy.deepcopy(fst.fold(training.net))
    training.backward(2)
    masked(batch(2)).square().mean().backward()
    for (name, p), q in zip(training.net.named_parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    before = layer.weight.detach().clone()
    training.optimizer.step()
    assert (layer.weight[pruned] != before[pruned]).all()


def test_dpf_sparsity_is_zero_before_training_and_the_goal_after_the_ramp():
    schedule = fst.get_strategy("dpf", sparsity=0.6, ramp=0.25).schedule
    assert schedule.sparsity(0.6, 0, 100) == 0
    assert schedule.sparsity(0.6, 5, 100) == pytest.approx(0.6 * (1 - 0.8**3))
    assert schedule.sparsity(0.6, 25, 100) == schedule.sparsity(0.6, 90, 100) == 0.6


# ---------------------------------------------------------------- rigl


def _ranked(values, candidates, count):
    """The ``count`` candidates of largest value, ties by index."""
    values = values.flatten().tolist()
    order = sorted(candidates, key=lambda i: (-values[i], i))
    return set(order[:count])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("allocation", ["erk", "uniform"])
def test_rigl_drops_the_smallest_and_grows_the_largest_gradients(optimizer, allocation):
    options = dict(interval=4, alpha=0.6, end=0.7, sparsity=0.7, allocation=allocation)
    training = Training("rigl", optimizer, **options)
    counts, updates = None, 0
    for step in range(20):
        training.backward(step)
        masks = training.masks()
        counts = counts or [int(mask.sum()) for mask in masks]
        before = copy.deepcopy([training.tensors_of(layer) for layer in training.layers])
        everything = [p.detach().clone() for p in training.net.parameters()]
        gradients = [layer.weight.grad.clone() for layer in training.layers]
        training.optimizer.step()
        if step % 4 or step >= 14:
            assert all(torch.equal(a, b) for a, b in zip(masks, training.masks(), strict=True))
            assert_held_at_zero(training)
            continue
        updates += 1
        fraction = 0.3 * (1 + math.cos(math.pi * step / 14))
        for layer, mask, old, gradient in zip(
            training.layers, masks, before, gradients, strict=True
        ):
            active = set(mask.flatten().nonzero().flatten().tolist())
            replaced = int(fraction * len(active))
            kept = _ranked(old[0].abs(), active, len(active) - replaced)
            grown = _ranked(gradient.abs(), set(range(mask.numel())) - kept, replaced)
            assert set(layer.state.kept_mask.flatten().nonzero().flatten().tolist()) == kept | grown
            new = layer.state.kept_mask & ~mask
            for tensor, previous in zip(training.tensors_of(layer), old, strict=False):
                assert (tensor[new] == 0).all(), "grown connections start from zero"
                assert (tensor[~layer.state.kept_mask] == 0).all()
                stay = layer.state.kept_mask & mask
                assert torch.equal(tensor[stay], previous[stay]), "no update in this step"
        for layer, p, q in zip(
            [None, "0.bias", None, "2.bias", "4.weight", "4.bias"],
            training.net.parameters(),
            everything,
            strict=True,
        ):
            assert layer is None or torch.equal(p, q), layer
        assert all(p.grad is not None for p in training.net.parameters())
    assert updates == 4
    assert [int(mask.sum()) for mask in training.masks()] == counts, "densities are constant"


def test_rigl_starts_from_random_masks_of_the_seed():
    first, same, other = (Training("rigl") for _ in range(3))
    fst.seed_random_rules(other.net, 4)
    for training in (first, same, other):
        training.backward(0)
    assert all(torch.equal(a, b) for a, b in zip(first.masks(), same.masks(), strict=True))
    assert not torch.equal(first.masks()[0], other.masks()[0])
    assert not torch.equal(first.masks()[0].flatten()[:288], first.masks()[1].flatten()[:288])


@pytest.mark.parametrize(("allocation", "left"), [("uniform", {"0"}), ("erk", set())])
def test_rigl_leaves_convolutions_of_images_dense_if_uniform(allocation, left):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    report = fst.convert(net, fst.get_strategy("rigl", allocation=allocation))
    assert set(report.skipped) == left


def test_rigl_shows_the_gradients_of_each_step():
    """Those that a replacement has hidden come back once."""
    training = Training("rigl", interval=4)
    training.step(0)
    training.backward(1)
    gradient = training.layers[0].weight.grad
    training.optimizer.step()
    assert training.layers[0].weight.grad is gradient


def test_erk_densities():
    """At a density that caps no layer, and at one that does: the small layers are then full."""
    shapes = [torch.Size(s) for s in ((64, 3, 7, 7), (64, 64, 3, 3), (128, 64, 1, 1))]
    sizes = [shape.numel() for shape in shapes]
    scores = [
        (64 + 3 + 14) / sizes[0],
        (64 + 64 + 6) / sizes[1],
        (128 + 64 + 2) / sizes[2],
    ]
    low = erk_densities(shapes, 0.02)
    for density, score in zip(low, scores, strict=True):
        assert density / score == pytest.approx(low[0] / scores[0])
    half = erk_densities(shapes, 0.5)
    assert half[2] == 1.0 and half[1] < half[0] < 1
    assert half[0] / scores[0] == pytest.approx(half[1] / scores[1])
    for density, densities in ((0.02, low), (0.5, half)):
        total = sum(d * size for d, size in zip(densities, sizes, strict=True))
        assert total == pytest.approx(density * sum(sizes))
    assert erk_densities(shapes, 1.0) == [1.0, 1.0, 1.0]
