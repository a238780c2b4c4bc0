"""sparse_linear: a 1x1 convolution over a sample's tokens, or over its map of them."""

import pytest
import torch
import torch.nn.functional as F

import fst
from tests.cases import error
from tests.oracle.conv import reference_linear
from tests.strategy_settings import DETERMINISTIC, SETTINGS, rows_and_shapes, setting

SHAPES = [(5, 12), (3, 7, 12), (2, 3, 4, 12), (1, 1, 12), (2, 9, 10), (2, 1, 5, 3, 8), (7,)]


def _operands(shape, outputs=9, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(*shape),
        draw(outputs, shape[-1]),
        draw(outputs) if bias else None,
        draw(*shape[:-1], outputs),
    )


def _run(function, operands, **options):
    input, weight, bias, grad_output = operands
    leaves = [None if t is None else t.clone().requires_grad_() for t in (input, weight, bias)]
    output = function(*leaves, **options)
    output.backward(grad_output)
    return [output.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("row", "shape"),
    rows_and_shapes(DETERMINISTIC, SHAPES, [(2, 9, 10), (2, 1, 5, 3, 8)]),
)
def test_equals_reference(row, shape):
    operands = _operands(shape)
    input, weight, bias, grad_output = operands
    expected = reference_linear(input, weight, grad_output, bias=bias, strategy=row.build())
    actual = _run(fst.sparse_linear, operands, strategy=row.build())
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape and error(a, e) <= 1e-10


@pytest.mark.parametrize("row", [row for row in SETTINGS if not row.deterministic])
def test_drawn_rows_run_and_follow_the_generator(row):
    operands = _operands((3, 7, 12))
    first, second, other = (
        _run(
            fst.sparse_linear,
            operands,
            strategy=row.build(),
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if row.drawn and row.name != "tsm":
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


TOKENS = [(5, 12), (3, 7, 12), (1, 1, 12), (0, 12), (64, 200), (2, 6, 5, 200), (2, 1, 5, 3, 8)]


@pytest.mark.parametrize("shape", TOKENS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_is_torchs_own_arithmetic(shape, bias):
    """Matrix products, as in a linear layer, and not a convolution."""
    operands = _operands(shape, dtype=torch.float32, bias=bias)
    actual = _run(fst.sparse_linear, operands, strategy="dense")
    layer = torch.nn.Linear(shape[-1], 9, bias=bias)
    model = torch.nn.Sequential(layer)
    fst.convert(model, "dense", layers="linear")

    def converted(input, *values):
        for name, value in zip(("weight", "bias"), values, strict=True):
            layer._parameters[name] = value if value is None else torch.nn.Parameter(value.detach())
        return model(input)

    output, grad_input, *_ = _run(converted, operands)
    for a, e in zip(actual, _run(F.linear, operands), strict=True):
        assert a is e is None or torch.equal(a, e)
    assert torch.equal(output, actual[0]) and torch.equal(grad_input, actual[1])


def test_an_output_may_be_changed_in_place():
    operands = _operands((6, 12))
    actual = _run(lambda *leaves: fst.sparse_linear(*leaves, strategy="dense").relu_(), operands)
    expected = _run(lambda *leaves: F.linear(*leaves).relu_(), operands)
    for a, e in zip(actual, expected, strict=True):
        assert error(a, e) <= 1e-12


def test_a_gradient_that_is_no_matrix():
    """As of a sum, which is expanded from one number."""
    input, weight, bias, _ = _operands((6, 12))
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    fst.sparse_linear(*leaves, strategy="dense").sum().backward()
    expected = [weight.sum(0).expand(6, 12), input.sum(0).expand(9, 12), torch.full((9,), 6.0)]
    for leaf, e in zip(leaves, expected, strict=True):
        assert error(leaf.grad, e.double()) <= 1e-12


def test_one_position_per_sample_leaves_grad_weight_dense():
    operands = _operands((6, 12))
    strategy = setting("fst-decoupled").build()
    grad_weight = _run(fst.sparse_linear, operands, strategy=strategy)[2]
    dense = _run(F.linear, operands)[2]
    assert error(grad_weight, dense) <= 1e-12


def test_autocast():
    input, weight, bias, _ = _operands((3, 7, 12), dtype=torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = fst.sparse_linear(input, weight, bias, strategy="fst_w")
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12)])
@pytest.mark.parametrize("name", ["fst", "sdgp"])
def test_no_positions_are_an_empty_batch(name, shape):
    operands = _operands(shape)
    actual = _run(fst.sparse_linear, operands, strategy=fst.get_strategy(name, decay=0.0))
    for a, e in zip(actual, _run(F.linear, operands), strict=True):
        assert torch.equal(a, e)
