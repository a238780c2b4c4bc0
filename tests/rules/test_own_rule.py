"""A rule from outside the package: one class, and everything works with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fst
from fst.api.report import describe_layer
from fst.rules.rule import Lattice, Rule
from tests.cases import error
from tests.networks import batch, small_net, stepped_gradients


@dataclass(frozen=True)
class Checkerboard(Rule):
    """Every other element of the weight."""

    operand: str = "weight"
    density: float = 0.5

    def weight_mask(self, weight: Tensor, gemm: str, groups: int, generator=None) -> Tensor:
        return (torch.arange(weight.numel(), device=weight.device) % 2 == 0).view(weight.shape)


@dataclass(frozen=True)
class TopRows(Rule):
    """The upper half of the output map, in grad_weight."""

    operand: str = "input"

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...]:
        return (Lattice(0, 2, 0, 1),)


@dataclass(frozen=True)
class Clipped(Rule):
    """Small elements of grad_output, dropped."""

    operand: str = "grad_output"

    def prune_grad_output(self, grad_output, gemm, groups, generator=None, memory=None) -> Tensor:
        return torch.where(grad_output.abs() > 0.1, grad_output, 0)


OWN = fst.Strategy("own", Checkerboard(), Clipped(), TopRows(), decay=0.5)


def test_it_trains_folds_and_decays():
    net = small_net()
    assert len(fst.convert(net, OWN).layers) == 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = net(batch()).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    folded = fst.fold(net)
    torch.testing.assert_close(folded(batch()), net.eval()(batch()))
    assert (folded[0].weight.flatten()[1::2] == 0).all() and folded[0].weight.flatten()[0] != 0


def test_its_gradients_are_what_it_says():
    layer = nn.Conv2d(4, 8, 3, padding=1).double()
    fst.convert(layer, OWN)
    input = batch().requires_grad_()
    output = layer(input)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    kept = layer.effective_weight()
    x, dense = input.detach().clone().requires_grad_(), layer.weight.detach().clone()
    dense.requires_grad_()
    clipped = torch.where(grad_output.abs() > 0.1, grad_output, 0)
    nn.functional.conv2d(x, dense, padding=1).backward(clipped)
    assert error(input.grad, x.grad) < 1e-12
    dense.grad = None
    rows = grad_output.clone()
    rows[:, :, 1::2] = 0
    nn.functional.conv2d(x, dense, padding=1).backward(rows)
    assert error(layer.weight.grad, dense.grad) < 1e-12
    decayed = stepped_gradients(layer)["weight"] - dense.grad
    assert error(decayed, 0.5 * (dense - kept).detach()) < 1e-12


def test_it_is_reported():
    net = small_net()
    fst.convert(net, OWN)
    report = describe_layer(net[0]).gemms
    assert [report[gemm].mode for gemm in report] == ["simulated"] * 3
    assert "Checkerboard" in report["output"].rule
