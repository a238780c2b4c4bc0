"""STEP: dense Adam, then S(W) with the second moment held."""

import pytest
import torch

import fst
from tests.networks import small_net, train
from tests.strategies.weight_systems import OPTIMIZERS, Training


def step_training(optimizer="adamw", total=20, **options):
    training = Training("step", optimizer, total=total, **options)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.01
    return training


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_step_switches_at_the_latest_and_then_holds_the_moment(mean):
    training = step_training(mean=mean, earliest=0.25, latest=0.25)
    training.steps(5)
    layer = training.layers[0]
    assert fst.verify(fst.fold(training.net)).ok
    moment = training.optimizer.state[layer.weight]["max_exp_avg_sq"].clone()
    weight = layer.weight.detach().clone()
    training.step(5)
    group, state = training.optimizer.param_groups[0], training.optimizer.state[layer.weight]
    rate = group["lr"] / (1 - group["betas"][0] ** 6)
    expected = weight * (1 - group["lr"] * group["weight_decay"])
    expected -= rate * state["exp_avg"] / (moment.sqrt() + group["eps"] ** 0.75)
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_step_switches_when_the_moment_is_steady():
    training = step_training(total=100)
    for group in training.optimizer.param_groups:
        group["eps"] = 1e3
    training.steps(10)
    assert training.layers[0].current_strategy.output is None
    training.step(10)
    assert training.layers[0].current_strategy.output is not None


def test_step_is_dense_adam_before_the_switch():
    training, twin = step_training(), small_net()
    optimizer = OPTIMIZERS["adamw"](twin.parameters())
    training.steps(4)
    train(twin, optimizer, range(4))
    for p, q in zip(training.net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_layers_without_a_gradient_are_left_alone():
    training = step_training()
    frozen = training.layers[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    training.steps(20)
    assert torch.equal(frozen, before)
    assert training.layers[1].current_strategy.output is not None
    assert fst.verify(fst.fold(training.net)).ok


def test_step_needs_adam():
    with pytest.raises(ValueError, match="optimizer is a SGD: strategy 'step' holds the second"):
        step_training("sgd")
