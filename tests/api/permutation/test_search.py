"""The order of channels that N:M keeps most in, against all orders of a few channels."""

import itertools
import math

import pytest
import torch

from fst.channels.search import Reader, best_order, kept_magnitude
from tests.oracle.conv import reference_nm_mask


def readers_of(channels, *shapes, seed=0):
    """Magnitudes of unequal channels and rows, for (rows, n)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    scale = draw(channels, 1).exp()
    return [
        Reader((draw(channels, rows) * scale * draw(rows).exp()).abs(), n) for rows, n in shapes
    ]


def optimum(readers, m):
    """The most that any order keeps: over all ways to divide the channels into groups of m."""

    def worth(group):
        return sum(
            sum(sorted((row[c] for c in group), reverse=True)[:n])
            for magnitudes, n in readers
            for row in magnitudes.double().T.tolist()
        )

    channels = range(len(readers[0].magnitudes))
    worths = {group: worth(group) for group in itertools.combinations(channels, m)}

    def best(left):
        if not left:
            return 0.0
        first, *others = left
        return max(
            worths[first, *group] + best([c for c in others if c not in group])
            for group in itertools.combinations(others, m - 1)
        )

    return best(list(channels))


@pytest.mark.parametrize(
    ("channels", "m", "shapes"),
    [
        (8, 4, [(5, 2)]),
        (12, 4, [(5, 2)]),
        (12, 4, [(7, 1)]),
        (9, 3, [(6, 2)]),
        (12, 6, [(4, 4)]),
        (12, 4, [(3, 2), (130, 3)]),
    ],
)
def test_few_channels_find_the_best_order(channels, m, shapes):
    for seed in range(2):
        readers = readers_of(channels, *shapes, seed=seed)
        order = best_order(readers, m, 100)
        assert sorted(order.tolist()) == list(range(channels))
        assert kept_magnitude(readers, order, m) == pytest.approx(optimum(readers, m), rel=1e-5)


def test_what_is_kept_is_what_the_mask_keeps():
    readers = readers_of(16, (300, 2))
    order = torch.randperm(16)
    weight = readers[0].magnitudes[order].T
    expected = weight[reference_nm_mask(weight, 2, 4, 1)].double().sum().item()
    assert kept_magnitude(readers, order, 4) == pytest.approx(expected)


def test_more_attempts_keep_no_less():
    readers = readers_of(64, (40, 2), (90, 1))
    kept = [kept_magnitude(readers, best_order(readers, 4, count), 4) for count in (0, 10, 100)]
    native = kept_magnitude(readers, torch.arange(64), 4)
    assert native < kept[0] <= kept[1] <= kept[2] and kept[2] > kept[0]


@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, math.nan, 1e38, 1e-42])
def test_odd_values_stay_or_gain(value):
    magnitudes = torch.full((16, 6), value)
    assert best_order([Reader(magnitudes, 2)], 4, 5).tolist() == list(range(16))
    magnitudes = readers_of(16, (6, 2))[0].magnitudes
    magnitudes[3, 2] = value
    order = best_order([Reader(magnitudes, 2)], 4, 5)
    assert sorted(order.tolist()) == list(range(16))


def test_equal_weights_get_equal_orders():
    first, second = (best_order(readers_of(64, (30, 2)), 4, 10) for _ in range(2))
    assert torch.equal(first, second)
