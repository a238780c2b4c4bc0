"""What a step's record holds, against autograd itself."""

import math

import errors
import pytest
import torch
import torch.nn.functional as F
from model_under_test import same_draws
from record import conv_names, record_step
from torch import nn


class Shared(nn.Module):
    """A convolution that runs twice, its input being used elsewhere too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        y = F.relu(self.twice(x), inplace=True) + x
        return self.frozen(self.twice(y))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_record_of_a_shared_layer(scale):
    torch.manual_seed(0)
    model, images = Shared().double(), torch.randn(3, 2, 5, 6, dtype=torch.float64)
    step = record_step(model, lambda: model(images).pow(2).mean(), scale=scale)
    assert list(step.layers) == ["first", "twice", "frozen"]

    x = model.first(images)
    given = [x.detach().requires_grad_(), None, None]
    a = model.twice(given[0])
    given[1] = (a.relu() + x).detach().requires_grad_()
    b = model.twice(given[1])
    given[2] = b.detach().requires_grad_()
    loss = model.frozen(given[2]).pow(2).mean()
    to_b = torch.autograd.grad(loss, given[2])[0]
    to_y, second = torch.autograd.grad(b, [given[1], model.twice.weight], to_b)
    to_a = to_y * (a > 0)
    to_x, first = torch.autograd.grad(a, [given[0], model.twice.weight], to_a)
    calls = step.layers["twice"].calls
    assert [len(record.calls) for record in step.layers.values()] == [1, 2, 1]
    for call, input, grad_output, grad_input in zip(
        calls, given, (to_a, to_b), (to_x, to_y), strict=False
    ):
        assert torch.allclose(call.input, input)
        assert torch.allclose(call.grad_output, grad_output)
        assert torch.allclose(call.grad_input, grad_input)
    assert torch.allclose(step.layers["twice"].grad_weight, first + second)
    assert step.layers["first"].calls[0].grad_input is None
    assert step.layers["frozen"].grad_weight is None
    assert torch.allclose(step.layers["first"].calls[0].grad_output, to_x + to_y)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_names():
    model = Shared()
    assert conv_names(model) == ["first", "twice", "frozen"]
    assert conv_names(model, ["f*"]) == ["first", "frozen"]
    with pytest.raises(ValueError, match="'nothing' matches no convolution. There are: first"):
        conv_names(model, ["nothing"])
    with pytest.raises(ValueError, match="no 2-D convolution"):
        conv_names(nn.Linear(2, 2))


def test_draws_repeat_and_leave_no_trace():
    state = torch.get_rng_state()
    with same_draws(7, torch.device("cpu")):
        one = torch.rand(3)
    with same_draws(7, torch.device("cpu")):
        assert torch.equal(torch.rand(3), one)
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_of_vectors():
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    approximate = [torch.tensor([3.0, 1.0]), torch.tensor([[2.0]])]
    found = errors.error_of(approximate, exact)
    assert found.relative == pytest.approx(5**0.5 / 5)
    assert found.cosine == pytest.approx(17 / (14**0.5 * 5))
    assert found.norm == pytest.approx(14**0.5 / 5)
    zero = [torch.zeros(2), torch.zeros(1, 1)]
    assert errors.error_of(zero, zero) == (0.0, 1.0, 1.0)
    assert errors.error_of(exact, zero) == (float("inf"), 0.0, float("inf"))
    assert errors.error_of(zero, exact) == (1.0, 0.0, 0.0)
    assert errors.mean([errors.Error(0, 1, 2), errors.Error(1, 0, 4)]) == (0.5, 0.5, 3)
    broken = errors.error_of([torch.tensor([1.0, float("inf")]), exact[1]], exact)
    assert all(map(math.isnan, broken))
    with pytest.raises(ValueError, match="shapes differ"):
        errors.error_of([torch.zeros(2)], [torch.zeros(3)])
