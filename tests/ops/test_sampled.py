"""Positions drawn by importance: exactly as many as promised, exact in the mean, never silent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

import fst
from fst.backends import force
from fst.ops import cpp
from fst.ops.positions.draw import count_of, draw_positions
from fst.ops.positions.lists import mean_of
from fst.rules.sampled import UNIT, Positions, Sampled, _lengths
from fst.rules.strategy import Strategy
from tests.cases import CASES, RANDOMS, Case, Operands, error, random_case
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


def _wild(shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape).double().flatten()
    values[torch.randint(len(values), (2,))] = torch.tensor([math.nan, math.inf]).double()
    return values.view(shape)


FAMILIES: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": lambda shape: torch.randn(shape).double(),
    "wide": lambda shape: torch.randn(shape).double().mul(12).exp(),
    "tiny": lambda shape: torch.randn(shape).double() * 1e-30,
    "zero": lambda shape: torch.zeros(shape, dtype=torch.float64),
    "ties": lambda shape: torch.randint(0, 3, shape).double(),
    "rare": lambda shape: torch.randn(shape).double() * (torch.rand(shape) < 0.1),
    "wild": _wild,
}


@settings(max_examples=150)
@given(RANDOMS)
def test_the_draw_is_the_references(draw: random.Random) -> None:
    """As many distinct positions as promised; in C++ the same."""
    torch.manual_seed(draw.getrandbits(32))
    family = draw.choice(list(FAMILIES))
    shape = (draw.randint(1, 3), 1, draw.randint(1, 9), draw.randint(1, 9))
    grads = FAMILIES[family](shape).float().double()  # as exact in the kernel's float32
    keep = draw.uniform(0.01, 1)
    start = draw.choice((0.0, 0.999, draw.random()))
    scores = Sampled().scores(grads)
    count = count_of(keep, len(scores))
    where = torch.tensor(start, dtype=torch.float64)
    found = Sampled().choose(scores, count, where)
    what = f"{family}, {shape}, keep {keep}, start {start}"
    places = found.places.tolist()
    assert places == sorted(set(places)) and len(places) == len(found.weight) == count, what
    assert bool((found.weight >= 1).all()), what
    expected = reference_sample(grads, keep, start).flatten()
    weights = torch.zeros_like(expected)
    weights[found.places.long()] = found.weight
    assert error(weights, expected) <= 1e-6, f"not the reference's draw: {what}"
    if cpp.missing():
        return
    kernel = Positions(*draw_positions(scores.float(), count, where))
    assert len(set(kernel.places.tolist())) == count, what
    both = weights[kernel.places.long()]
    # an end may lie a few of 2³¹ parts beside the other's: then a neighbour is drawn
    other = int((both == 0).sum())
    assert other <= 1 and error(kernel.weight.double()[both > 0], both[both > 0]) <= 1e-5, what


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


# ---------------------------------------------------------------- exact in the mean


def few_positions(draw: random.Random) -> tuple[Case, Operands, int, Sampled]:
    """A convolution with few positions, in float64, how many to take of them, and by which rule."""
    torch.manual_seed(draw.getrandbits(32))
    shape = random_case(draw)
    operands = shape.operands(torch.float64)
    operands.grad_output *= torch.randn(operands.grad_output[:, :1].shape).double().exp()
    operands = Operands(operands.input[:1], operands.weight, None, operands.grad_output[:1])
    rule = Sampled(keep=draw.choice((0.5, 0.25, 0.1)), center=draw.random() < 0.5)
    return shape, operands, count_of(rule.keep, len(scores_of(operands))), rule


@settings(max_examples=25)
@given(RANDOMS)
def test_the_mean_over_all_starts_is_the_exact_gradient(draw: random.Random) -> None:
    """Of the input and of the weight; a draw in C++ gives what PyTorch's does."""
    shape, operands, count, rule = few_positions(draw)
    means = [0.0, 0.0]
    with force(grad_weight="torch", grad_input="torch"):
        for start, probability in starts(scores_of(operands), count):
            at = At(keep=rule.keep, center=rule.center, start=start)
            found = gradients(shape, operands, at, at)
            means = [m + probability * g for m, g in zip(means, found, strict=True)]
    for mean, exact in zip(means, gradients(shape, operands, None), strict=True):
        off = error(mean, exact)
        assert off <= 1e-10, f"a mean is {off:.1e} off: {rule}, {shape}"
    maps = (operands.input, operands.weight, operands.grad_output)
    input, weight, grad_output = (t.float() for t in maps)
    single = Operands(input, weight, None, grad_output)
    at, results = At(keep=rule.keep, center=rule.center, start=draw.random()), []
    for backend in BACKENDS:
        with force(grad_weight=backend, grad_input=backend):
            results.append(gradients(shape, single, at, at))
    for mine, theirs in zip(results[0], results[-1], strict=True):
        assert error(mine, theirs.double()) <= 1e-5, f"C++ and PyTorch differ: {rule}, {shape}"


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
        ({"keep": 2}, r"keep=2 must be a number in \(0, 1\]\.$"),
        ({"keep": 0}, r"keep=0 must be a number"),
        ({"keep": 1.5}, r"keep=1.5 must be a number"),
        ({"keep": True}, "keep=True must be"),
        ({"keep": math.nan}, "keep=nan must be a number"),
        ({"center": 1}, "center=1 must be"),
        ({"grad_input": 0.0}, "grad_input=0.0 must be a number"),
        ({"axis": "rows"}, "no option 'axis'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        fst.get_strategy("sampled", **options)
