"""Sampled and banded weight gradients: exact in the mean, and as cheap as they say."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst.ops import positions
from fst.ops.reference import reference_conv2d
from fst.report import describe_layer
from fst.rules.bands import Bands
from fst.rules.rule import Rule
from fst.rules.sampled import AXES, Sampled
from fst.rules.strategy import Strategy
from tests.cases import CASES, Case, Operands, error

BANDS = ("LL", "LH", "HL", "HH")


def gradient(case: Case, operands: Operands, rule: Rule | None) -> torch.Tensor:
    weight = operands.weight.clone().requires_grad_()
    strategy = Strategy("test", grad_weight=rule)
    output = fst.sparse_conv2d(operands.input, weight, **case.arguments, strategy=strategy)
    return torch.autograd.grad(output, weight, operands.grad_output)[0]


def oracle(case: Case, operands: Operands, rule: Rule) -> torch.Tensor:
    """grad_weight as unfold and matmul have it."""
    return reference_conv2d(
        operands.input,
        operands.weight,
        operands.grad_output,
        **case.arguments,
        strategy=Strategy("test", grad_weight=rule),
    ).grad_weight


def mean_over_draws(case: Case, operands: Operands, make, draws: int) -> torch.Tensor:
    return sum(gradient(case, operands, make(phase)) for phase in range(draws)) / draws


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("axis", AXES)
def test_the_mean_over_all_draws_is_the_exact_gradient(axis, case):
    operands = case.operands()
    exact = gradient(case, operands, None)
    for keep, center, split in itertools.product((2, 4), (True, False), (True, False)):

        def make(phase, **options):
            return Sampled(axis=axis, phase=phase, **options)

        if split and axis == "samples":
            continue
        make = functools.partial(make, keep=keep, center=center, split=split)

        assert error(mean_over_draws(case, operands, make, keep), exact) <= 1e-12


@pytest.mark.parametrize("axis", ["rows", "columns", "both"])
@pytest.mark.parametrize("keep", [2, 4])
def test_split_with_a_fixed_phase_is_exact_over_all_orders_of_a_batch(keep, axis):
    case = Case("batch", (4, 4), (6, 7), padding=1, batch=4)
    operands = case.operands()
    orders = list(itertools.permutations(range(4)))

    def mean(rule: Rule) -> torch.Tensor:
        batches = (
            replace(operands, input=operands.input[[*o]], grad_output=operands.grad_output[[*o]])
            for o in orders
        )
        return sum(gradient(case, batch, rule) for batch in batches) / len(orders)

    exact = gradient(case, operands, None)
    rule = Sampled(keep=keep, axis=axis, phase=1, split=True, center=False)
    assert error(mean(rule), exact) <= 1e-12
    assert error(mean(replace(rule, split=False)), exact) > 0.1


@pytest.mark.parametrize("size", [(6, 7), (1, 1)])
@pytest.mark.parametrize("axis", ["rows", "columns", "both"])
@pytest.mark.parametrize("keep", [2, 4])
def test_each_part_of_a_split_batch_is_the_references(keep, axis, size):
    case = Case("split", (4, 4), size, padding=1, batch=6)
    operands = case.operands()
    for phase in range(keep):
        rule = Sampled(keep=keep, axis=axis, phase=phase, split=True)
        expected = oracle(case, operands, rule)
        assert error(gradient(case, operands, rule), expected) <= 1e-12


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_all_bands_together_are_the_exact_gradient(case):
    operands = case.operands()
    exact = gradient(case, operands, None)
    assert error(gradient(case, operands, Bands(keep=BANDS, sample=())), exact) <= 1e-12
    for block in ((1, 2), (2, 1)):
        whole = Bands(block=block, keep=("L", "H"), sample=())
        assert error(gradient(case, operands, whole), exact) <= 1e-12

    def sampled(phase):
        return Bands(keep=("LL",), sample=BANDS[1:], unbiased=True, phase=phase)

    assert error(mean_over_draws(case, operands, sampled, 3), exact) <= 1e-12


def test_images_of_two_sizes_with_maps_of_one():
    """What centring has made for one of them is not taken for the other."""
    rule = Sampled(axis="rows", phase=0)
    for height in (8, 7):
        case = Case("size", (2, 4), (height, 8), stride=2, padding=1)
        operands = case.operands()
        expected = oracle(case, operands, rule)
        assert error(gradient(case, operands, rule), expected) <= 1e-12


@settings(max_examples=60, deadline=None)
@given(
    size=some.tuples(some.integers(1, 9), some.integers(1, 9)),
    kernel=some.tuples(some.integers(1, 4), some.integers(1, 4)),
    stride=some.tuples(some.integers(1, 3), some.integers(1, 3)),
    padding=some.tuples(some.integers(0, 3), some.integers(0, 3)),
    dilation=some.tuples(some.integers(1, 2), some.integers(1, 2)),
    groups=some.sampled_from([1, 2]),
    batch=some.integers(1, 5),
    axis=some.sampled_from(AXES),
    keep=some.sampled_from([2, 4]),
)
def test_any_convolution(size, kernel, stride, padding, dilation, groups, batch, axis, keep):
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(n, r - 2 * p) for n, r, p in zip(size, reach, padding, strict=True))
    case = Case("any", (4, 6), size, kernel, stride, padding, dilation, groups, batch)
    operands = case.operands()
    exact = gradient(case, operands, None)
    mean = mean_over_draws(
        case, operands, lambda phase: Sampled(keep=keep, axis=axis, phase=phase), keep
    )
    assert error(mean, exact) <= 1e-11
    assert error(gradient(case, operands, Bands(keep=BANDS, sample=())), exact) <= 1e-11


RULES = [
    *(Sampled(keep=k, axis=axis, phase=1) for k in (2, 4) for axis in AXES),
    Sampled(split=True, phase=0),
    Sampled(keep=4, split=True, phase=0),
    Bands(phase=1),
    Bands(sample=()),
    Bands(block=(1, 2), keep=("L",), sample=()),
    Bands(sample=("LH", "HL", "HH"), unbiased=True, phase=2),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_no_gradient_follows(mode, monkeypatch):
    monkeypatch.setattr(positions, "keep", None)
    layer = nn.Sequential(nn.Conv2d(4, 4, 1))
    fst.convert(layer, "sampled", plan={"0": {"rule": "sampled"}})
    images = torch.randn(2, 4, 8, 8)
    with mode():
        assert layer(images).shape == images.shape
    with pytest.raises(TypeError, match="not callable"):
        layer(images)


@pytest.mark.parametrize("size", [12, 9])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_multiply_adds_are_what_the_rule_promises(rule, kernel, size):
    """Counted by torch; centring adds the sums of grad_output and small products of them."""
    case = Case("flops", (8, 8), (size, size), (kernel, kernel), padding=kernel // 2, batch=12)
    operands = case.operands(torch.float32)

    def flops(rule):
        weight = operands.weight.clone().requires_grad_()
        strategy = Strategy("test", grad_weight=rule)
        output = fst.sparse_conv2d(operands.input, weight, **case.arguments, strategy=strategy)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(output, weight, operands.grad_output)
        return counter.get_total_flops()

    part, whole = rule.kept("grad_weight", operands.weight.shape, 1, size, size)
    bare = replace(rule, center=False) if isinstance(rule, Sampled) else rule
    assert flops(bare) * whole == pytest.approx(part * flops(None), rel=1e-12)
    if size == 12:
        assert part / whole == rule.density
    if rule.centers:
        terms = 1 + sum(x.column_step > 1 for x in rule.kept_positions(size, size, rule.phase))
        # one row of the product for each tap, and what is left of that for each column
        sums = 2 * terms * kernel * operands.grad_output.numel() * (1 + kernel / 12)
        assert 0 < flops(rule) - flops(bare) <= sums


@pytest.mark.parametrize("name", ["strided", "transposed", "gemm", "masked"])
@pytest.mark.parametrize("rule", [*RULES[:8:3], RULES[-3]], ids=str)
def test_every_program_computes_the_same(rule, name):
    if name == "masked" and isinstance(rule, Bands):
        pytest.skip("bands filter the input, which a mask cannot")
    for case in CASES[:4]:
        operands = case.operands()
        with fst.backends.force(grad_weight="strided"):
            expected = gradient(case, operands, rule)
        with fst.backends.force(grad_weight=name):
            assert error(gradient(case, operands, rule), expected) <= 1e-12


@pytest.mark.parametrize(("keep", "axis"), [(2, "rows"), (4, "both"), (2, "both")])
def test_what_a_1x1_convolution_saves(keep, axis):
    images = torch.randn(8, 16, 12, 12)
    weight = torch.randn(4, 16, 1, 1, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        strategy = Strategy("test", grad_weight=Sampled(keep=keep, axis=axis, phase=0))
        fst.sparse_conv2d(images, weight, strategy=strategy)
    of_input = [t for t in saved if t.dim() == 4 and t.shape[2] > 1]
    assert sum(t.numel() for t in of_input) == images.numel() // keep
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in of_input)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))


def phases(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """The gradients of the first layer's weight, step by step, at the same weights and batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    images, found = torch.randn(4, 3, 12, 12), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        found.append(model[0].weight.grad.clone())
    return found


def test_draws_come_from_seed_rank_layer_and_step():
    def run(seed, rank=0):
        model = net()
        fst.convert(model, "sampled", plan={})
        fst.seed_random_rules(model, seed, rank)
        return phases(model, 8)

    first, again = run(3), run(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], other) for other in first[1:])
    for other in (run(4), run(3, rank=1)):
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_small_maps_stay_dense_and_the_report_says_so():
    model = net()
    fst.convert(model, "sampled", plan={})
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    reports = [describe_layer(layer).gemms["grad_weight"] for layer in (model[0], model[2])]
    assert [report.mode for report in reports] == ["accelerated", "dense"]
    assert reports[1].reason.startswith("the output map is 6x6: ")


def test_centring_takes_the_mean_out_of_the_variance():
    """Where X is its mean nearly everywhere, sampling loses next to nothing."""
    case = Case("mean", (4, 4), (16, 16), padding=1, batch=8)
    operands = case.operands()
    operands.input = 5 + 1e-3 * operands.input
    exact = gradient(case, operands, None)
    centred = gradient(case, operands, Sampled(phase=0))
    plain = gradient(case, operands, Sampled(phase=0, center=False))
    assert error(centred, exact) < 0.01 < 0.1 < error(plain, exact)
