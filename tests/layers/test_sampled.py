"""Layers that sample positions: draws by step, one list, and what gains nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fst
from fst.api.report import describe_layer
from fst.rules.sampled import Sampled


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))


def steps(model: nn.Module, count: int) -> list[Tensor]:
    """The gradients of the first layer's weight, step by step, at the same weights and batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    images, found = torch.randn(4, 3, 12, 12), []
    for _ in range(count):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        found.append(model[0].weight.grad.clone())
    return found


def test_draws_come_from_seed_rank_layer_and_step():
    def run(seed, rank=0):
        model = net()
        fst.convert(model, "sampled")
        fst.seed_random_rules(model, seed, rank)
        return steps(model, 4)

    first, again = run(3), run(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], other) for other in first[1:])
    for other in (run(4), run(3, rank=1)):
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_list_serves_both_gradients(monkeypatch):
    drawn = []
    choose = Sampled.choose

    def counted(self, scores, count, start):
        drawn.append(count)
        return choose(self, scores, count, start)

    monkeypatch.setattr(Sampled, "choose", counted)
    for options, lists in (({"grad_input": 0.5}, [72]), ({"grad_input": 0.25}, [72, 36])):
        layer = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
        fst.convert(layer, fst.get_strategy("sampled", **options))
        images = torch.randn(1, 4, 12, 12, dtype=torch.float64, requires_grad=True)
        layer.double()(images).square().sum().backward()
        assert drawn == lists
        drawn.clear()


def test_a_layer_that_gains_nothing_runs_exactly(monkeypatch):
    """What is measured decides, the report has the numbers, and later calls are the library's."""
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    model, dense = net(), net()
    fst.convert(model, "sampled")
    reports = [describe_layer(layer).gemms["grad_weight"] for layer in (model[0], model[2])]
    assert [report.mode for report in reports] == ["may be accelerated"] * 2
    images = torch.randn(2, 3, 4, 4)  # far too small to gain
    for network in (model, dense):
        network(images).square().sum().backward()
    report = describe_layer(model[2]).gemms["grad_weight"]
    assert report.mode == "dense" and " ms" in report.reason
    assert torch.equal(model[2].weight.grad, dense[2].weight.grad)
    assert "SparseConv2d" in model(images).grad_fn.name()  # all of a step is computed alike
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    output = model(images)
    assert "SparseConv2d" not in output.grad_fn.name()
    with pytest.raises(RuntimeError, match="double backward.*'sampled'"):  # as in other steps
        torch.autograd.grad(output.sum(), model[2].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="forward-mode.*'sampled'"), forward_ad.dual_level():
        model(forward_ad.make_dual(images, images))
    assert "SparseConv2d" in model(torch.randn(3, 3, 4, 4)).grad_fn.name()  # not yet measured
    assert fst.metrics(model)["sparsity/positions"] == 1
