"""Bias of weight gradients: of known estimators, and of Eq. 10 as theory has it."""

import math

import pytest
import torch
from approximations import parse
from bias import PARTS, MeanGradient, biases, parts_of
from saliency import saliency
from torch import nn
from torch.nn import functional as F

CURVATURE = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)


def test_parts_of_a_kernel_of_three():
    gradient = torch.randn(2, 5, 3, 3, dtype=torch.float64)
    parts = parts_of(gradient)
    assert tuple(parts) == PARTS and torch.equal(parts["whole"], gradient)
    vectors = {"mean": [1.0, 1, 1], "slope": [-1.0, 0, 1], "curvature": [1.0, -2, 1]}
    for degree, vector in vectors.items():
        vector = torch.tensor(vector, dtype=torch.float64)
        along = {"kw": gradient @ vector, "kh": gradient.mT @ vector}
        for axis, expected in along.items():
            found = parts[f"{degree} along {axis}"]
            torch.testing.assert_close(found.abs(), (expected / vector.norm()).abs())
    squares = [parts[f"{degree} along kw"].square().sum() for degree in vectors]
    assert sum(squares) == pytest.approx(gradient.square().sum())


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((1, 3), 4), ((2, 2), 5), ((7, 7), 7)])
def test_parts_of_other_kernels(shape, count):
    assert len(parts_of(torch.randn(2, 3, *shape))) == count


def mean_gradient(distort, count=200):
    generator = torch.Generator().manual_seed(0)
    mean = MeanGradient()
    for _ in range(count):
        exact = 1 + torch.randn(4, 4, 3, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
        mean.add(distort(exact, noise), exact)
    return mean


def test_what_averages_out_and_what_stays():
    """Noise of a standard deviation s leaves s/√n by chance; a factor stays."""
    unbiased = biases([mean_gradient(lambda exact, noise: exact + 3 * noise)])["whole"]
    assert unbiased.chance == pytest.approx(3 / math.sqrt(200), rel=0.05)
    assert unbiased.relative == pytest.approx(unbiased.chance, rel=0.15)
    assert abs(unbiased.gain - 1) < 3 * unbiased.deviation < 0.1
    biased = biases([mean_gradient(lambda exact, noise: 0.5 * exact)])["whole"]
    assert biased.relative == pytest.approx(0.5) and biased.gain == pytest.approx(0.5)
    assert biased.cosine == pytest.approx(1) and biased.chance < 0.05
    assert math.isnan(biases([mean_gradient(lambda exact, _: exact, 1)])["whole"].chance)


def test_standard_errors_of_three_batches_by_hand():
    generator = torch.Generator().manual_seed(0)
    found, exact = torch.randn(2, 3, 2, 2, 1, 1, generator=generator, dtype=torch.float64)
    mean = MeanGradient()
    for pair in zip(found, exact, strict=True):
        mean.add(*pair)
    bias = biases([mean])["whole"]
    size = exact.mean(0).norm()
    error = ((found - exact).var(0).sum() / 3).sqrt()
    assert bias.chance == pytest.approx(float(error / size))
    products, squares = ((other * exact).flatten(1).sum(1) for other in (found, exact))
    gain = products.sum() / squares.sum()
    assert bias.gain == pytest.approx(float(gain))
    deviation = ((products - gain * squares).square().sum() / 2 / 3).sqrt() / squares.mean()
    assert bias.deviation == pytest.approx(float(deviation))


def test_layers_count_as_one_vector():
    """Two layers of the same gradients, one of them lost."""
    whole, lost = (mean_gradient(lambda e, _, factor=factor: factor * e) for factor in (1.0, 0.0))
    together = biases([whole, lost])["whole"]
    assert together.relative == pytest.approx(math.sqrt(0.5))
    assert together.cosine == pytest.approx(math.sqrt(0.5))
    assert together.gain == pytest.approx(0.5)


def found(strategy, teacher, size=16, count=12):
    """`saliency` of a layer whose exact mean gradient is that of ``teacher`` (3, 3), on noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False)).double()
    kernel = teacher.expand(4, 4, 3, 3)
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(8, 4, size, size, generator=generator, dtype=torch.float64)
        for _ in range(count)
    ]

    def loss(model, images):
        return (model(images) * F.conv2d(images, kernel, padding=1)).sum()

    return saliency(model, loss, batches, parse(strategy))


def test_eq_10_is_a_low_pass_filter_along_the_width():
    """(A[k] + A[k−1])/2 leaves a sixth of a curvature along kw, and keeps one along kh."""
    horizontal = found("fst", CURVATURE.expand(3, 3)).bias["curvature along kw"]
    assert horizontal.gain == pytest.approx(1 / 6, abs=0.05) and horizontal.relative > 0.75
    vertical = found("fst", CURVATURE[:, None].expand(3, 3)).bias["curvature along kh"]
    assert vertical.gain == pytest.approx(2.5 / 3, abs=0.05) and vertical.cosine > 0.93


def test_a_larger_error_may_have_less_bias():
    """Sampling against Eq. 10: the single gradient is worse, the mean of many is better."""
    smooth = torch.ones(3, 3, dtype=torch.float64)
    sampled, fst = (found(name, smooth, 8, 60) for name in ("sampled,keep=0.125", "fst"))
    single = [one.layers[0].errors["local grad_weight"].relative for one in (sampled, fst)]
    assert single[0] > 1.1 * single[1]
    assert abs(sampled.bias["whole"].gain - 1) < 3 * sampled.bias["whole"].deviation
    assert abs(fst.bias["whole"].gain - 1) > 10 * fst.bias["whole"].deviation
    assert sampled.bias["whole"].relative < 1.5 * sampled.bias["whole"].chance
    assert fst.bias["whole"].relative > 3 * fst.bias["whole"].chance
    assert sampled.bias["whole"].relative < fst.bias["whole"].relative / 2
    assert fst.layers[0].bias == fst.bias
