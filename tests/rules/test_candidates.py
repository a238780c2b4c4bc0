"""The candidates of benchmarks/: as a literal reference in float64, and exact in the mean."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fst
from benchmarks.candidates import ByBoth, Checkerboard, Samples
from fst.backends import force
from fst.ops import cpp
from fst.ops.positions.lists import mean_of
from fst.rules.sampled import UNIT, Sampled, _lengths
from tests.cases import CASES, Case, Operands, error
from tests.oracle.rules import reference_sample

RULES = [ByBoth(), ByBoth(keep=0.3), Samples(), Samples(keep=0.3), Checkerboard()]
RULES += [ByBoth(center=False), Samples(center=False), Checkerboard(center=False)]
NUMBERED = [case for case in CASES if not isinstance(case.padding, str)]  # F.unfold takes numbers
BACKENDS = ["torch"] + ["cpp"] * (not cpp.missing())


def gradient(case: Case, operands: Operands, rule: Sampled | None, backend="torch") -> Tensor:
    """grad_weight."""
    weight = operands.weight.clone().requires_grad_()
    strategy = fst.Strategy("test", grad_weight=rule)
    output = fst.sparse_conv2d(operands.input, weight, **case.arguments, strategy=strategy)
    with force(grad_weight=backend):
        return torch.autograd.grad(output, weight, operands.grad_output)[0]


def centred(operands: Operands, rule: Sampled) -> Tensor:
    """X − μ, or X."""
    mean = mean_of(operands.input) if rule.center else torch.zeros(operands.input.shape[1])
    return operands.input - mean[:, None, None].to(operands.input.dtype)


def score(case: Case, operands: Operands, rule: Sampled) -> Tensor:
    """(N, P, Q) ‖dY‖·‖X_col‖ of `ByBoth`."""
    geometry = {k: case.arguments[k] for k in ("dilation", "padding", "stride")}
    columns = F.unfold(centred(operands, rule), operands.weight.shape[2:], **geometry)
    grads = operands.grad_output
    return grads.norm(dim=1) * columns.norm(dim=1).view(grads[:, 0].shape)


def weights(case: Case, operands: Operands, rule: Sampled, start: float) -> Tensor:
    """What each position counts, (N, P, Q), place by place."""
    samples, _, height, width = operands.grad_output.shape
    if isinstance(rule, ByBoth):
        return reference_sample(score(case, operands, rule)[:, None], rule.keep, start)
    found = torch.zeros(samples, height, width, dtype=torch.float64)
    count = math.ceil(rule.keep * samples)
    for n in range(samples):
        if isinstance(rule, Samples):
            first, last = (math.floor(i * count / samples + start) for i in (n, n + 1))
            found[n] = samples / count if last > first else 0
            continue
        for p in range(height):
            for q in range(width):
                found[n, p, q] = 2 if (n + p + q) % 2 == (start >= 0.5) else 0
    return found


def reference(case: Case, operands: Operands, rule: Sampled, start: float) -> Tensor:
    """dW of the weighted positions for X − μ, and of all positions for μ."""
    seen = centred(operands, rule)
    count = weights(case, operands, rule, start)[:, None].to(seen.dtype)
    parts = ((seen, operands.grad_output * count), (operands.input - seen, operands.grad_output))
    total = torch.zeros_like(operands.weight)
    for images, grads in parts:
        weight = operands.weight.clone().requires_grad_()
        arguments = {k: v for k, v in case.arguments.items() if k != "bias"}
        total += torch.autograd.grad(F.conv2d(images, weight, **arguments), weight, grads)[0]
    return total


def start_at(monkeypatch, start: float) -> None:
    monkeypatch.setattr(
        Sampled, "draw_start", lambda self, *_: torch.tensor(start, dtype=torch.float64)
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("case", NUMBERED, ids=lambda case: case.id)
def test_as_the_reference(case, rule, monkeypatch):
    operands = case.operands()
    for start in (0.1, 0.7):
        start_at(monkeypatch, start)
        expected = reference(case, operands, rule, start)
        assert error(gradient(case, operands, rule), expected) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_in_float32(rule, backend, monkeypatch):
    case = Case("float32", (6, 8), (9, 7), padding=1, batch=8)
    operands = case.operands(torch.float32)
    start_at(monkeypatch, 0.7)
    expected = reference(case, operands, rule, 0.7)
    assert error(gradient(case, operands, rule, backend), expected) <= 1e-5


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_mean_over_all_starts_is_the_exact_gradient(rule, batch, monkeypatch):
    case = Case("mean", (4, 6), (5, 3), padding=1, batch=batch)
    operands = case.operands()
    places = [i / batch for i in range(batch)] + [0.5]
    if isinstance(rule, ByBoth):
        scores = score(case, operands, rule).flatten()
        ends = _lengths(scores, math.ceil(rule.keep * len(scores) - 1e-9)).cumsum(0)
        places = [int(end) % UNIT / UNIT for end in ends]
    places = sorted({0.0, *places})
    mean = torch.zeros_like(operands.weight)
    for low, high in zip(places, [*places[1:], 1.0], strict=True):
        start_at(monkeypatch, low + (high - low) / 2)
        mean += (high - low) * gradient(case, operands, rule)
    assert error(mean, gradient(case, operands, None)) <= 1e-7


def test_fewer_positions_are_multiplied(monkeypatch):
    case = Case("count", (4, 6), (6, 6), padding=1, batch=8)
    operands = case.operands()
    positions = operands.grad_output[:, 0].numel()
    for rule in RULES:
        scores = rule.scores(operands.grad_output, lambda: torch.ones(positions))
        drawn = rule.choose(scores, math.ceil(rule.keep * positions), torch.tensor(0.3))
        share = math.ceil(rule.keep * 8) / 8 if isinstance(rule, Samples) else rule.keep
        assert len(drawn.places) == math.ceil(share * positions)


def test_a_checkerboard_keeps_a_half():
    with pytest.raises(ValueError, match="keep=0.25: a checkerboard keeps 0.5"):
        Checkerboard(keep=0.25)


def test_scores_by_both_need_the_input():
    layer = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)  # which saves no input
    fst.convert(layer, fst.Strategy("test", grad_input=ByBoth()))
    with pytest.raises(ValueError, match="ByBoth needs the input"):
        layer(torch.randn(2, 3, 5, 5, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("name", ["by_both", "samples", "checkerboard", "eq10"])
def test_they_train_and_are_reported(name):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3))
    report = fst.convert(net, name)
    assert all(layer.gemms["grad_weight"].rule != "dense" for layer in report.layers)
    net(torch.randn(4, 3, 6, 6)).square().sum().backward()
    tokens = torch.nn.Linear(3, 4)
    fst.convert(tokens, name, layers="linear")
    tokens(torch.randn(4, 5, 3)).square().sum().backward()
    assert all(layer.weight.grad.isfinite().all() for layer in (*net, tokens))
