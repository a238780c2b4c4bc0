"""Positions drawn by importance: exactly as many as promised, exact in the mean, never silent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

import fst
from fst.backends import force
from fst.ops import cpp
from fst.ops.positions.lists import mean_of
from fst.rules.sampled import UNIT, Sampled, _lengths
from fst.rules.strategy import Strategy
from tests.cases import CASES, Case, Operands, error
from tests.oracle.conv import reference_conv2d
from tests.oracle.rules import reference_sample

BACKENDS = ["torch"] + ["cpp"] * (not cpp.missing())
START = torch.tensor(0.3, dtype=torch.float64)


@dataclass(frozen=True)
class At(Sampled):
    """`Sampled` whose draws start at a place that is known."""

    start: float = 0.3

    def draw_start(self, generator, seed, device) -> Tensor:
        return torch.tensor(self.start, dtype=torch.float64)


def gradients(case: Case, operands: Operands, weight_rule, input_rule=None) -> list[Tensor]:
    """grad_input and grad_weight."""
    leaves = [t.clone().requires_grad_() for t in (operands.input, operands.weight)]
    strategy = Strategy("test", grad_input=input_rule, grad_weight=weight_rule)
    output = fst.sparse_conv2d(*leaves, **case.arguments, strategy=strategy)
    return list(torch.autograd.grad(output, leaves, operands.grad_output))


def scores_of(operands: Operands) -> Tensor:
    return Sampled().scores(operands.grad_output)


def starts(scores: Tensor, count: int) -> list[tuple[float, float]]:
    """Every start at which another list is drawn, and the probability of that list."""
    ends = _lengths(scores, count).cumsum(0)
    places = sorted({0, *(int(end) % UNIT for end in ends)})
    widths = [b - a for a, b in zip(places, [*places[1:], UNIT], strict=True)]
    return [(place / UNIT, width / UNIT) for place, width in zip(places, widths, strict=True)]


some_scores = some.lists(
    some.one_of(some.sampled_from([0.0, 1.0, 1e-30, 1e30]), some.floats(0, 1e3, width=32)),
    min_size=1,
    max_size=40,
)


# ---------------------------------------------------------------- the draw


@settings(max_examples=200)
@given(values=some_scores, share=some.floats(0.01, 1), start=some.floats(0, 1, exclude_max=True))
def test_exactly_so_many_distinct_positions(values, share, start):
    scores = torch.tensor(values)
    count = math.ceil(share * len(values))
    drawn = Sampled().choose(scores, count, torch.tensor(start, dtype=torch.float64))
    assert len(drawn.places) == len(drawn.weight) == count
    assert len(set(drawn.places.tolist())) == count
    assert drawn.places.tolist() == sorted(drawn.places.tolist())
    assert (drawn.weight >= 1).all()


@settings(max_examples=200)
@given(values=some_scores, data=some.data())
def test_probabilities_are_proportional_and_sum_up(values, data):
    scores = torch.tensor(values, dtype=torch.float64)
    count = data.draw(some.integers(1, len(values)))
    lengths = _lengths(scores, count)
    assert int(lengths.sum()) == count * UNIT
    assert 0 < int(lengths.min()) and int(lengths.max()) <= UNIT
    least = scores + scores.mean() * 2**-20 if scores.sum() > 0 else torch.ones_like(scores)
    shared = lengths < UNIT
    share = (lengths[shared].sum() / least[shared].sum()) * least[shared]
    assert ((lengths[shared] - share).abs() <= 2 + 1e-9 * share).all()
    assert shared.all() or not shared.any() or least[~shared].min() >= least[shared].max()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("keep", [0.5, 0.2])
def test_the_draw_is_the_references(case, keep):
    operands = case.operands()
    scores = scores_of(operands)
    count = math.ceil(keep * len(scores) - 1e-9)
    for start in (0.0, 0.25, 0.999):
        drawn = Sampled().choose(scores, count, torch.tensor(start, dtype=torch.float64))
        weights = torch.zeros_like(scores).index_put((drawn.places.long(),), drawn.weight)
        expected = reference_sample(operands.grad_output, keep, start).flatten()
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=0)


# ---------------------------------------------------------------- exact in the mean


@settings(max_examples=25)
@given(
    size=some.tuples(some.integers(1, 6), some.integers(1, 6)),
    kernel=some.tuples(some.integers(1, 3), some.integers(1, 3)),
    stride=some.tuples(some.integers(1, 3), some.integers(1, 3)),
    padding=some.tuples(some.integers(0, 2), some.integers(0, 2)),
    dilation=some.tuples(some.integers(1, 2), some.integers(1, 2)),
    groups=some.sampled_from([1, 2]),
    batch=some.integers(1, 3),
    keep=some.sampled_from([0.5, 0.25, 0.1]),
    center=some.booleans(),
)
def test_the_mean_over_all_starts_is_the_exact_gradient(
    size, kernel, stride, padding, dilation, groups, batch, keep, center
):
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(n, r - 2 * p) for n, r, p in zip(size, reach, padding, strict=True))
    case = Case("any", (4, 6), size, kernel, stride, padding, dilation, groups, batch)
    operands = case.operands()
    scores = scores_of(operands)
    count = math.ceil(keep * len(scores) - 1e-9)
    means = [0.0, 0.0]
    for start, probability in starts(scores, count):
        rule = At(keep=keep, center=center, start=start)
        with force(grad_weight="torch", grad_input="torch"):
            found = gradients(case, operands, rule, rule)
        means = [m + probability * g for m, g in zip(means, found, strict=True)]
    for mean, exact in zip(means, gradients(case, operands, None), strict=True):
        assert error(mean, exact) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_precision(case, dtype, backend):
    """At most twice the error of the library's gradients of the same weighted grad_output."""
    operands = case.operands(dtype)
    rule = At(keep=0.5, center=False)
    exact = {name: getattr(operands, name).double() for name in ("input", "weight", "grad_output")}
    scores = Sampled().scores(operands.grad_output)
    count = math.ceil(0.5 * len(scores))
    drawn = rule.choose(scores, count, START)
    weights = torch.zeros_like(scores).index_put((drawn.places.long(),), drawn.weight)
    maps = weights.double().view(len(operands.grad_output), 1, *case.output_size)
    weighted = exact["grad_output"] * maps
    rounded = Operands(operands.input, operands.weight, None, weighted.to(dtype))
    expected = gradients(case, Operands(exact["input"], exact["weight"], None, weighted), None)
    library = gradients(case, rounded, None)
    with force(grad_weight=backend, grad_input=backend):
        found = gradients(case, operands, rule, rule)
    for mine, theirs, truth in zip(found, library, expected, strict=True):
        least = torch.finfo(dtype).eps
        assert mine.dtype == dtype
        assert error(mine, truth) <= max(2 * error(theirs, truth), least)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep", [0.5, 0.3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_centred_as_the_reference_in_float32(case, keep, backend):
    operands = case.operands(torch.float32)
    rule = At(keep=keep)
    with force(grad_weight=backend, grad_input=backend):
        found = gradients(case, operands, rule, rule)
    reference = reference_conv2d(
        operands.input,
        operands.weight,
        operands.grad_output,
        **case.arguments,
        strategy=Strategy("test", grad_input=rule, grad_weight=rule),
        draws={"start": 0.3},
    )
    assert error(found[0], reference.grad_input) <= 1e-5
    assert error(found[1], reference.grad_weight) <= 1e-5


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keep", [0.5, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_comes_out(dtype, keep, wild, backend):
    case = Case("wild", (3, 8), (9, 9), padding=1, batch=4)
    operands = case.operands(dtype)
    operands.grad_output[2, 5, 4, 4] = wild
    for center in (True, False):
        rule = At(keep=keep, center=center)
        with force(grad_weight=backend, grad_input=backend):
            grad_input, grad_weight = gradients(case, operands, rule, rule)
        assert not grad_weight[5].isfinite().any()
        assert not grad_input[2].isfinite().all()
        if not center:
            others = [o for o in range(8) if o != 5]
            assert grad_weight[others].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_values_that_are_not_finite_come_out(backend):
    case = Case("wild", (3, 8), (9, 9), padding=1)
    operands = case.operands(torch.float32)
    operands.grad_output[:] = math.nan
    with force(grad_weight=backend, grad_input=backend):
        for found in gradients(case, operands, At(keep=0.1), At(keep=0.1)):
            assert found.isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_positions_are_drawn_alike(value, backend):
    case = Case("equal", (3, 4), (6, 6), (1, 1), batch=2)
    operands = case.operands(torch.float32)
    operands.grad_output[:] = value
    operands.input[:] = 1
    rule = At(keep=0.25, center=False)
    with force(grad_weight=backend, grad_input=backend):
        found = gradients(case, operands, rule, rule)
    assert torch.allclose(found[1], torch.full_like(found[1], value * 72), rtol=1e-6)
    kept = found[0][:, 0].abs().gt(0)
    assert int(kept.sum()) == 18 * (value != 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [0, 1])
def test_one_position_and_none(batch, backend):
    case = Case("few", (3, 4), (3, 3), batch=batch)
    operands = case.operands(torch.float32)
    with force(grad_weight=backend, grad_input=backend):
        found = gradients(case, operands, At(keep=0.5), At(keep=0.5))
    for mine, exact in zip(found, gradients(case, operands, None), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-6)


def test_positions_without_gradient_are_not_computed():
    """Where few positions have a gradient, all of these are kept, and count once."""
    case = Case("masked", (4, 4), (8, 8), padding=1, batch=4)
    operands = case.operands()
    operands.grad_output[:, :, 3:] = 0
    exact = gradients(case, operands, None)
    for mine, whole in zip(gradients(case, operands, At(), At()), exact, strict=True):
        assert error(mine, whole) <= 1e-12


def test_centring_takes_the_mean_out_of_the_variance():
    """Where X is its mean nearly everywhere, sampling loses next to nothing."""
    case = Case("mean", (4, 4), (16, 16), padding=1, batch=8)
    operands = case.operands()
    operands.input = 5 + 1e-3 * operands.input
    exact = gradients(case, operands, None)[1]
    centred = gradients(case, operands, At())[1]
    plain = gradients(case, operands, At(center=False))[1]
    assert error(centred, exact) < 0.01 < 0.1 < error(plain, exact)


def test_a_class_token_is_kept_for_sure():
    tokens = torch.randn(8, 17, 6, dtype=torch.float64)
    weight = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    output = fst.sparse_linear(tokens, weight, strategy=Strategy("t", grad_weight=At(keep=0.5)))
    of_class = torch.zeros_like(output)
    of_class[:, 0] = torch.randn(8, 5, dtype=torch.float64)
    (found,) = torch.autograd.grad(output, weight, of_class)
    expected = torch.einsum("no,ni->oi", of_class[:, 0], tokens[:, 0])
    assert error(found, expected) <= 1e-12


def test_the_mean_is_that_of_the_whole_batch_however_it_is_sorted():
    """Every eighth sample counts: a first eighth that is unlike the rest says little of them."""
    images = torch.rand(64, 3, 6, 6, dtype=torch.float64) + 1
    images[:8] *= 0.02
    assert error(mean_of(images), images.mean((0, 2, 3))) <= 0.05
    assert torch.equal(mean_of(images[:1]), images[0].mean((1, 2)))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 2}, r"keep=2 must be a share of the positions, in \(0, 1\]\.$"),
        ({"keep": 0}, r"keep=0 must be a share"),
        ({"keep": 1.5}, r"keep=1.5 must be a share"),
        ({"keep": True}, "keep=True must be"),
        ({"keep": math.nan}, "keep=nan must be a share"),
        ({"center": 1}, "center=1 must be"),
        ({"grad_input": 0.0}, "grad_input=0.0 must be a share"),
        ({"axis": "rows"}, "no option 'axis'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        fst.get_strategy("sampled", **options)
