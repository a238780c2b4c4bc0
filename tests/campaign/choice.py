"""Choice by importance: the draw is the literal one, and exact in the mean."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fst
from benchmarks.every_network import NETWORKS
from fst.backends import force
from fst.lab.arguments import source_and_name
from fst.models.named import build_architecture
from fst.ops import cpp
from fst.ops.positions import draw as drawing
from fst.rules.sampled import Positions, Sampled
from fst.rules.strategy import Strategy
from tests.campaign.shared import Checks, assert_equal_weights, random_shape, train
from tests.cases import Case, Operands, error
from tests.ops.test_sampled import At, gradients, scores_of, starts
from tests.oracle.rules import reference_sample

DRAWS = 100  # whose variance is compared with that of all
FEW = 160  # positions whose draws are all enumerated
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
        ("draw", 300, _check_draw),
        ("mean", 150, _check_mean),
        ("variance", 40, _check_variance),
        ("recomputed", 30, _check_recomputed),
        *networks,
    ]


# ---------------------------------------------------------------- draws


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


def _check_draw(draw: random.Random) -> None:
    """As many distinct positions as promised, those of the reference; in C++ the same."""
    torch.manual_seed(draw.getrandbits(32))
    family = draw.choice(list(FAMILIES))
    shape = (draw.randint(1, 3), 1, draw.randint(1, 9), draw.randint(1, 9))
    grads = FAMILIES[family](shape).float().double()  # as exact in the kernel's float32
    keep, start = draw.uniform(0.01, 1), draw.random()
    scores = Sampled().scores(grads)
    count = drawing.count_of(keep, len(scores))
    where = torch.tensor(start, dtype=torch.float64)
    found = Sampled().choose(scores, count, where)
    what = f"{family}, {tuple(shape)}, keep {keep}, start {start}"
    assert len(set(found.places.tolist())) == len(found.places) == count, what
    assert bool((found.weight >= 1).all()), what
    expected = reference_sample(grads, keep, start).flatten()
    weights = torch.zeros_like(expected)
    weights[found.places.long()] = found.weight
    assert error(weights, expected) <= 1e-6, f"not the reference's draw: {what}"
    if cpp.missing():
        return
    kernel = Positions(*drawing.draw_positions(scores.float(), count, where))
    assert len(set(kernel.places.tolist())) == count, what
    both = weights[kernel.places.long()]
    # an end may lie a few of 2³¹ parts beside the other's: then a neighbour is drawn
    other = int((both == 0).sum())
    assert other <= 1 and error(kernel.weight.double()[both > 0], both[both > 0]) <= 1e-5, what


def _few(draw: random.Random) -> tuple[Case, Operands, int, Sampled]:
    """A convolution with few positions, in float64, how many to take of them, and by which rule."""
    torch.manual_seed(draw.getrandbits(32))
    shape = random_shape(draw)
    operands = shape.operands(torch.float64)
    operands.grad_output *= torch.randn(operands.grad_output[:, :1].shape).double().exp()
    operands = Operands(operands.input[:1], operands.weight, None, operands.grad_output[:1])
    rule = Sampled(keep=draw.choice((0.5, 0.25, 0.1)), center=draw.random() < 0.5)
    return shape, operands, drawing.count_of(rule.keep, len(scores_of(operands))), rule


def _check_mean(draw: random.Random) -> None:
    """The mean over all draws is the exact gradient, of the input and of the weight."""
    shape, operands, count, rule = _few(draw)
    means = [0.0, 0.0]
    with force(grad_weight="torch", grad_input="torch"):
        for start, probability in starts(scores_of(operands), count):
            at = At(keep=rule.keep, center=rule.center, start=start)
            found = gradients(shape, operands, at, at)
            means = [m + probability * g for m, g in zip(means, found, strict=True)]
    for mean, exact in zip(means, gradients(shape, operands, None), strict=True):
        assert error(mean, exact) <= 1e-10, (
            f"a mean is {error(mean, exact):.1e} off: {rule}, {shape}"
        )
    if cpp.missing():
        return
    single = Operands(
        operands.input.float(), operands.weight.float(), None, operands.grad_output.float()
    )
    at, results = At(keep=rule.keep, center=rule.center, start=draw.random()), []
    for backend in ("torch", "cpp"):
        with force(grad_weight=backend, grad_input=backend):
            results.append(gradients(shape, single, at, at))
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs.double()) <= 1e-5, f"C++ and PyTorch differ: {rule}, {shape}"


def _check_variance(draw: random.Random) -> None:
    """The variance of draws from a generator is that of all draws, each with its probability."""
    shape, operands, count, rule = _few(draw)
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
    net = build_architecture(*source_and_name(name), **given)
    fst.convert(net, Strategy("s", grad_weight=Sampled(keep=0.25)), layers="all")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(2):
        net(torch.randn(2, 3, size, size)).square().mean().backward()
        optimizer.step()
    wrong = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not wrong, f"no finite gradient of {wrong[:3]}"
    shares = {k: v for k, v in fst.metrics(net).items() if "positions" in k}
    assert shares and all(0 < share <= 1 for share in shares.values()), shares
