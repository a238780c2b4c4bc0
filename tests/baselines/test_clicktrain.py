"""ClickTrain: patterns, whole kernels, and the lasso that leads there."""

import pytest
import torch

import fst
from fst.baselines.clicktrain import KernelPatterns, pattern_mask
from fst.rules.schedule import Run
from tests.oracle.rules import reference_kernel_mask
from tests.strategies.weight_systems import (
    OPTIMIZERS,
    Training,
    assert_held_at_zero,
    for_gradients_that_are_not_plain,
)

FOUR = ("000011011", "000110110", "011011000", "110110000")


def _pattern_of(kernel):
    return "".join("1" if entry else "0" for entry in kernel.flatten().tolist())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clicktrain_kernels_have_patterns_of_the_set_or_are_gone(optimizer):
    training = Training("clicktrain", optimizer, choose=0.2, enforce=0.5, connectivity=0.25)
    for step in range(20):
        training.step(step)
        for mask in training.masks():
            if step < 9:
                assert mask.all(), "dense until the masks are enforced"
                continue
            kernels = [_pattern_of(kernel) for kernel in mask.flatten(0, 1)]
            assert kernels.count("0" * 9) == round(0.25 * len(kernels))
            assert set(kernels) <= {*FOUR, "0" * 9}
        if step == 9:
            enforced = training.masks()
    assert all(torch.equal(a, b) for a, b in zip(enforced, training.masks(), strict=True))
    assert_held_at_zero(training)
    assert int((fst.fold(training.net)[0].weight != 0).sum()) == 4 * round(0.75 * 32)


def test_clicktrain_chooses_among_squares_too_small_for_float16():
    torch.manual_seed(0)
    weight, rule = (torch.randn(8, 8, 3, 3) * 2e-4).half(), KernelPatterns()
    assert torch.equal(rule.weight_mask(weight, "output", 1), reference_kernel_mask(weight, rule))
    layer = torch.nn.Conv2d(8, 8, 3).half()
    fst.convert(layer, "clicktrain")
    layer.weight.data, layer.weight.grad = weight, torch.ones_like(weight)
    layer.strategy.schedule._select(layer)
    assert torch.equal(
        layer.state.schedule_state["patterns"], pattern_mask(weight.float().square(), 4)
    )


def test_clicktrain_chooses_by_weight_times_gradient():
    training = Training("clicktrain", choose=0.2, enforce=0.5)
    training.steps(4)
    assert "patterns" not in training.layers[0].state.schedule_state
    training.backward(4)
    layer = training.layers[0]
    scores = (layer.weight * layer.weight.grad).detach().square().flatten(0, 1)
    training.optimizer.step()
    chosen = layer.state.schedule_state["patterns"].flatten(0, 1)
    for kernel, mask in zip(scores, chosen, strict=True):
        values = kernel.flatten().tolist()
        sums = [sum(values[i] for i in range(9) if pattern[i] == "1") for pattern in FOUR]
        assert _pattern_of(mask) == FOUR[sums.index(max(sums))]
    totals = scores.sum((1, 2)).tolist()
    kept = sorted(range(32), key=lambda i: -totals[i])[: 32 - 12]
    assert set(layer.state.schedule_state["kernels"].flatten().nonzero().flatten().tolist()) == set(
        kept
    )


def test_clicktrain_lasso_is_the_gradient_of_the_sum_of_norms():
    training = Training("clicktrain", choose=0.2, enforce=0.9, lasso=0.5)
    training.steps(6)
    training.backward(6)
    expected = []
    for layer in training.layers:
        weight = layer.weight.detach().clone().requires_grad_()
        state = layer.state.schedule_state
        penalty = sum(
            ((weight * ~state[key]).square().sum((2, 3)) + 1e-8).sqrt().sum()
            for key in ("patterns", "kernels")
        )
        (pull,) = torch.autograd.grad(penalty, weight)
        expected.append(layer.weight.grad + 0.5 * pull)
    seen = []
    training.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(layer.weight.grad.clone() for layer in training.layers)
    )
    training.optimizer.step()
    for actual, e in zip(seen, expected, strict=True):
        torch.testing.assert_close(actual, e)


@for_gradients_that_are_not_plain
def test_clicktrain_needs_plain_gradients_for_its_lasso(change, message):
    training = Training("clicktrain", choose=0.0)
    training.step(0)
    training.backward(1)
    change(training.optimizer)
    with pytest.raises(RuntimeError, match=message):
        training.optimizer.step()


def test_clicktrain_follows_its_weights_to_another_device():
    training = Training("clicktrain", choose=0.0)
    training.step(0)
    training.net.to("meta")
    for layer in training.layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer = OPTIMIZERS["sgd"](training.net.parameters())
    run, schedule = Run(optimizer, training.net, 20), training.layers[0].strategy.schedule
    with torch.no_grad():
        schedule.before_update(training.layers, run, 2)
        schedule.after_update(training.layers, run, 20)
    assert all(layer.state.kept_mask.is_meta for layer in training.layers)
