"""The transposable mask: N:M along both axes of a matrix."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fst.rules.transposable_masks import transposable_mask
from tests.oracle.conv import reference_transposable_mask, transposable_patterns
from tests.rules.groups import kept_counts


def _best_of_ninety(tile):
    return max(
        float(tile.double().abs()[torch.tensor(pattern)].sum())
        for pattern in transposable_patterns()
    )


@given(st.lists(st.integers(-4, 4), min_size=16, max_size=16))
def test_transposable_2_4_is_optimal(values):
    tile = torch.tensor(values, dtype=torch.float32).reshape(4, 4)
    mask = transposable_mask(tile)
    assert mask.dtype == torch.bool
    assert (mask.sum(0) == 2).all() and (mask.sum(1) == 2).all()
    assert float(tile.abs()[mask].sum()) == _best_of_ninety(tile)


@pytest.mark.parametrize("shape", [(4, 4), (16, 12), (6, 5), (1, 9), (9, 1), (3, 3), (13, 4)])
def test_transposable_2_4_equals_brute_force(shape):
    matrix = torch.randn(shape)
    assert torch.equal(transposable_mask(matrix), reference_transposable_mask(matrix))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_transposable_takes_infinities_first_and_then_the_best_of_the_rest(value):
    matrix = torch.randn(32, 24)
    matrix[torch.rand(32, 24) < 0.15] = value
    mask = transposable_mask(matrix)
    assert torch.equal(mask, reference_transposable_mask(matrix))
    by_hand = torch.tensor([[value, 5, 0, 0], [0, 0, 9, 3], [0, 0, 9, 3], [7, 0, 0, 0]])
    kept = [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    assert transposable_mask(by_hand).int().tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_transposable_dtypes_and_layout(dtype):
    matrix = (torch.randperm(64).reshape(8, 8) + 1).to(dtype)
    expected = reference_transposable_mask(matrix)
    assert torch.equal(transposable_mask(matrix), expected)
    assert torch.equal(transposable_mask(matrix.T.contiguous().T), expected)


def test_transposable_takes_batches_of_matrices():
    matrices = torch.randn(2, 3, 8, 4)
    mask = transposable_mask(matrices)
    for index in itertools.product(range(2), range(3)):
        assert torch.equal(mask[index], reference_transposable_mask(matrices[index]))


def test_transposable_mask_serves_both_directions():
    matrix = torch.randn(16, 24)
    mask = transposable_mask(matrix)
    for dim in (0, 1):
        assert all(kept == 2 for kept, _ in kept_counts(mask, 4, dim))


def _best_by_linear_program(tile, n):
    """Largest sum with n per row and column (the program's vertices are whole numbers)."""
    optimize = pytest.importorskip("scipy.optimize")
    m = len(tile)
    rows = [[float(i == r) for i, _ in itertools.product(range(m), repeat=2)] for r in range(m)]
    columns = [[float(j == c) for _, j in itertools.product(range(m), repeat=2)] for c in range(m)]
    result = optimize.linprog(
        -tile.abs().flatten().double().numpy(), A_eq=rows + columns, b_eq=[n] * 2 * m, bounds=(0, 1)
    )
    return -result.fun


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_are_broken_as_by_the_reference(dtype):
    """Equal rows have many best patterns, whose sums must not differ by rounding."""
    for seed in range(40):
        torch.manual_seed(seed)
        matrix = torch.randn(1, 8).repeat(8, 1).to(dtype)
        assert torch.equal(transposable_mask(matrix), reference_transposable_mask(matrix)), seed


@pytest.mark.parametrize("case", ["normal", "ties", "heavy", "zeros", "staircase"])
def test_transposable_4_8_is_a_2_approximation(case):
    matrices = {
        "normal": torch.randn(32, 40),
        "ties": torch.randint(0, 2, (32, 40)).float(),
        "heavy": torch.randn(32, 40) ** 5,
        "zeros": torch.zeros(32, 40),
        # rows that all want the same columns
        "staircase": torch.arange(40).expand(32, 40).float() + torch.rand(32, 40),
    }
    matrix = matrices[case]
    mask = transposable_mask(matrix, 4, 8)
    for top, left in itertools.product(range(0, 32, 8), range(0, 40, 8)):
        tile = matrix[top : top + 8, left : left + 8]
        kept = mask[top : top + 8, left : left + 8]
        assert (kept.sum(0) == 4).all() and (kept.sum(1) == 4).all()
        assert tile.abs()[kept].sum().item() >= 0.5 * _best_by_linear_program(tile, 4) - 1e-4


@given(st.lists(st.integers(0, 3), min_size=64, max_size=64))
def test_transposable_4_8_is_always_exact_in_count(values):
    mask = transposable_mask(torch.tensor(values, dtype=torch.float32).reshape(8, 8), 4, 8)
    assert (mask.sum(0) == 4).all() and (mask.sum(1) == 4).all()


@pytest.mark.parametrize("shape", [(5, 8), (8, 13), (11, 3)])
def test_transposable_4_8_never_exceeds_the_pattern_at_the_edge(shape):
    mask = transposable_mask(torch.randn(shape), 4, 8)
    assert mask.shape == shape
    for dim in (0, 1):
        assert all(kept <= 4 for kept, _ in kept_counts(mask, 8, dim))


def test_transposable_needs_a_matrix():
    with pytest.raises(ValueError, match="matrix"):
        transposable_mask(torch.zeros(8))
