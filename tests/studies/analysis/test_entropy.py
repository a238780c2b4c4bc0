"""Entropies against a count with plain Python."""

from collections import Counter
from math import log2

import pytest
import torch

from fst.studies.analysis.entropy import joint_counts, quantise, spatial_entropy, white_noise


def brute_force(image, levels):
    """H(X), H(X|X') of one (C, H, W) tensor, from Eq. 11 as it is written."""
    low, high = min(image.flatten().tolist()), max(image.flatten().tolist())
    pairs = []
    for channel in image.tolist():
        for row in channel:
            bins = [min(int((v - low) / ((high - low) or 1) * levels), levels - 1) for v in row]
            pairs += zip(bins[:-1], bins[1:], strict=True)
    total = len(pairs)
    marginal = Counter(right for _, right in pairs)
    entropy = -sum(n / total * log2(n / total) for n in marginal.values())
    conditional = 0.0
    for left, count in Counter(left for left, _ in pairs).items():
        given = Counter(right for other, right in pairs if other == left)
        inner = -sum(n / count * log2(n / count) for n in given.values())
        conditional += count / total * inner
    return entropy, conditional


@pytest.mark.parametrize("levels", [2, 5, 256])
def test_entropy_agrees_with_counting(levels):
    features = torch.randn(19, 3, 4, 5, dtype=torch.float64)  # more samples than one chunk
    features[1] = 0.5
    features[2] = features[2].round()
    found = spatial_entropy(features, levels)
    for sample in range(len(features)):
        entropy, conditional = brute_force(features[sample], levels)
        assert float(found.entropy[sample]) == pytest.approx(entropy, abs=1e-9)
        assert float(found.conditional[sample]) == pytest.approx(conditional, abs=1e-9)
    assert (found.conditional <= found.entropy + 1e-9).all()


def test_neighbours_that_tell_everything_or_nothing():
    stripes = torch.tensor([0.0, 1.0]).repeat(1, 1, 8, 8)
    found = spatial_entropy(stripes, 2)
    assert float(found.entropy) == pytest.approx(1.0, abs=0.02)
    assert float(found.conditional) == pytest.approx(0.0)
    assert float(found.shuffled) > 0.8
    noise = torch.rand(1, 1, 400, 400, generator=torch.Generator().manual_seed(0))
    found = spatial_entropy(noise, 8)
    assert float(found.entropy) == pytest.approx(3.0, abs=1e-2)
    assert float(found.conditional) == pytest.approx(float(found.shuffled), abs=1e-2)


def test_few_values_make_independent_neighbours_look_alike():
    noise = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = spatial_entropy(noise, 256, torch.Generator().manual_seed(0))
    assert (found.entropy - found.conditional > 3).all()
    assert (found.entropy - found.shuffled > 3).all()


def test_quantise_is_uniform_per_sample():
    features = torch.tensor([[0.0, 0.24, 0.26, 1.0], [-8.0, -6.1, -5.9, 0.0]])[:, None, None]
    assert quantise(features, 4).flatten(1).tolist() == [[0, 0, 1, 3], [0, 0, 1, 3]]
    assert quantise(torch.full((1, 1, 1, 3), 7.0)).eq(0).all()


def test_joint_counts():
    counts = joint_counts(torch.tensor([[0, 1, 1]]), torch.tensor([[2, 0, 0]]), 3)
    assert counts.tolist() == [[[0, 0, 1], [2, 0, 0], [0, 0, 0]]]


def test_white_noise_has_the_images_moments():
    images = torch.randn(8, 3, 40, 40) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) + 5
    noise = white_noise(images, torch.Generator().manual_seed(0))
    assert noise.shape == images.shape
    assert torch.allclose(noise.mean((0, 2, 3)), images.mean((0, 2, 3)), atol=0.1)
    assert torch.allclose(noise.std((0, 2, 3)), images.std((0, 2, 3)), rtol=0.05)


@pytest.mark.parametrize(
    ("shape", "levels", "message"), [((2, 3, 4, 1), 256, "W >= 2"), ((2, 3, 4, 5), 1, "levels=1")]
)
def test_errors(shape, levels, message):
    with pytest.raises(ValueError, match=message):
        spatial_entropy(torch.zeros(shape), levels)
