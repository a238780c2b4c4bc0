"""Choice by importance: the draw is the literal one, and exact in the mean."""

from __future__ import annotations

import math
import random
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fst
from benchmarks.every_network import NETWORKS
from fst.backends import force
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from fst.training.architecture import named_model
from tests.campaign.shared import Checks, assert_equal_weights, example_of, train
from tests.ops import test_sampled
from tests.ops.test_sampled import At, few_positions, gradients, scores_of, starts

DRAWS = 100  # whose variance is compared with that of all
SIZES = (32, 64, 224)
ONE_SIZE = {  # networks for images of one size, and the option that names it
    "torchvision:vit_b_16": "image_size",
    "timm:vit_small_patch16_224": "img_size",
    "timm:swin_tiny_patch4_window7_224": "img_size",
}
STRATEGIES = (
    ("sampled", {"keep": 0.5}),
    ("sampled", {"keep": 0.3, "grad_input": 0.5, "center": False}),
    ("fst_sampled", {"keep": 0.25}),
)


def checks() -> Checks:
    """Draws, their means and variances, recomputed trainings, networks."""
    networks = [
        (f"network-{name}-{size}", 1, partial(_check_network, name, size))
        for name in NETWORKS
        for size in SIZES
    ]
    return [
        ("draw", 300, example_of(test_sampled.test_the_draw_is_the_references)),
        ("mean", 150, example_of(test_sampled.test_the_mean_over_all_starts_is_the_exact_gradient)),
        ("variance", 40, _check_variance),
        ("recomputed", 30, _check_recomputed),
        *networks,
    ]


def _check_variance(draw: random.Random) -> None:
    """The variance of draws from a generator is that of all draws, each with its probability."""
    shape, operands, count, rule = few_positions(draw)
    exact = gradients(shape, operands, None)[1]

    def square(rule: Sampled) -> float:
        return float((gradients(shape, operands, rule)[1] - exact).square().sum())

    with force(grad_weight="torch"):
        known = [
            (probability, square(At(keep=rule.keep, center=rule.center, start=start)))
            for start, probability in starts(scores_of(operands), count)
        ]
        found = [square(rule) for _ in range(DRAWS)]
    mean, squares = (sum(p * s**power for p, s in known) for power in (1, 2))
    deviation = math.sqrt(max(squares - mean**2, 0) / DRAWS)
    off = abs(sum(found) / DRAWS - mean)
    what = f"variance {mean:.3g}, of {DRAWS} draws {off:.2g} off: {rule}, {shape}"
    assert off <= 6 * deviation + 1e-9 * float(exact.square().sum()) + 1e-12, what


# ---------------------------------------------------------------- trainings


def _net(seed: int, draw: random.Random) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    width, groups = draw.choice((6, 8)), draw.choice((1, 2))
    net = nn.Sequential(
        *(nn.Conv2d(4, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, draw.choice((1, 2)), 1, groups=groups), nn.ReLU()),
        nn.Conv2d(width, 4, 1),
    ).double()
    name, options = draw.choice(STRATEGIES)
    fst.convert(net, name, **options)
    fst.seed_random_rules(net, seed)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def _check_recomputed(draw: random.Random) -> None:
    """Activation checkpointing recomputes the forward pass and draws what it would have drawn."""
    seed, how = draw.getrandbits(32), {"use_reentrant": draw.random() < 0.5}
    (plain, one), (recomputed, other) = (_net(seed, random.Random(seed)) for _ in range(2))
    given = (range(3), (4, 4, 7, 7), torch.float64)
    train(plain, one, *given)
    train(partial(checkpoint, recomputed, **how), other, *given)
    assert_equal_weights(plain, recomputed, f"under checkpoint with {plain[0].strategy}")


def _check_network(name: str, size: int, draw: random.Random) -> None:
    """Two steps of a known network, each layer from a quarter of the positions."""
    torch.manual_seed(draw.getrandbits(32))
    given = {ONE_SIZE[name]: size} if name in ONE_SIZE else {}
    net = named_model(name, **given)
    fst.convert(net, Strategy("s", grad_weight=Sampled(keep=0.25)), layers="all")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(2):
        net(torch.randn(2, 3, size, size)).square().mean().backward()
        optimizer.step()
    wrong = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not wrong, f"no finite gradient of {wrong[:3]}"
    shares = {k: v for k, v in fst.metrics(net).items() if "positions" in k}
    assert shares and all(0 < share <= 1 for share in shares.values()), shares
