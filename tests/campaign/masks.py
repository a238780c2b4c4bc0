"""N:M masks of grouped convolutions in every precision, against the reference's, group by group."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fst
from fst.ops.prune import prune_weight
from tests.campaign.weights import Checks
from tests.cases import error, without_onednn
from tests.oracle.conv import reference_operands

COUNT = 12  # of each number of groups, dtype and pattern, at scale 1
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}
PATTERNS = ((2, 4), (1, 4), (1, 3), (3, 5), (2, 8), (4, 8))
STRATEGIES = ("srste", "fst", "fst_w", "tsm")
STEPS, LR = 3, 0.1


def _ties(weight: Tensor) -> Tensor:
    return (weight * 2).round() / 2


def _wild(weight: Tensor) -> Tensor:
    values = torch.tensor([math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 2.0, 0.5])
    return values[torch.randint(len(values), weight.shape)].to(weight.dtype)


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda weight: weight,
    "ties": _ties,
    "equal": torch.ones_like,
    "zero": torch.zeros_like,
    "tiny": lambda weight: weight * torch.finfo(weight.dtype).tiny,  # subnormal numbers
    "large": lambda weight: weight * (torch.finfo(weight.dtype).max / 8),
    "wild": _wild,
}


def checks() -> Checks:
    """Masks alone, and what a training loop computes with them."""
    found: Checks = []
    for groups, dtype, (n, m) in itertools.product(range(1, 5), TOLERANCE, PATTERNS):
        name = f"{groups}-{str(dtype).partition('.')[2]}-{n}:{m}"
        found.append((f"mask-{name}", COUNT, partial(_check_mask, groups, dtype, n, m)))
        found.append((f"loop-{name}", 2, partial(_check_loop, groups, dtype, n, m)))
    return found


def _strategy(draw: random.Random, n: int, m: int) -> fst.Strategy:
    name = draw.choice(STRATEGIES)
    if name == "tsm":  # transposable patterns of 2:4 are those that the reference enumerates
        return fst.get_strategy("tsm", interval=1)
    options = {"group_order": "im2col"} if name == "srste" and draw.random() < 0.3 else {}
    return fst.get_strategy(name, n=n, m=m, **options)


def _weight(draw: random.Random, groups: int, dtype: torch.dtype, family: str) -> Tensor:
    kernel = draw.choice(((1, 1), (3, 3), (1, 3), (2, 2)))
    outputs, inputs = groups * draw.randint(1, 11), draw.randint(1, 11)
    weight = FAMILIES[family](torch.randn(outputs, inputs, *kernel).to(dtype))
    if draw.random() < 0.4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return weight


def _check_mask(groups: int, dtype: torch.dtype, n: int, m: int, draw: random.Random) -> None:
    """S(W) and S(Wᵀ) are the weight's own bits where the reference keeps, and zero elsewhere."""
    torch.manual_seed(draw.getrandbits(32))
    family, strategy = draw.choice(list(FAMILIES)), _strategy(draw, n, m)
    if strategy.name == "tsm" and family in ("large", "wild"):
        family = "normal"  # sums of such magnitudes have no one order
    weight = _weight(draw, groups, dtype, family)
    pruned = prune_weight(weight, strategy, groups, dtype)
    kernel = weight.shape[2:]
    expected = reference_operands(
        torch.zeros(1, weight.shape[1] * groups, *kernel),
        weight,
        torch.zeros(1, len(weight), 1, 1),
        groups=groups,
        strategy=strategy,
    )
    what = f"{strategy.name}, {family}, {tuple(weight.shape)}, groups {groups}"
    for name, found, right in (
        ("S(W)", pruned.output, expected.output_weight),
        ("S(Wᵀ)", pruned.grad_input, expected.grad_input_weight),
    ):
        # an infinity that is dropped stays visible, as NaN
        right = right.masked_fill((right == 0) & ~weight.isfinite(), math.nan)
        equal = (found == right) | (found.isnan() & right.isnan())
        assert found.dtype == dtype and equal.all(), f"{name}: {what}"


def _check_loop(groups: int, dtype: torch.dtype, n: int, m: int, draw: random.Random) -> None:
    """A loop by hand: output, dX and dW of each step are those of `F.conv2d` on the masks."""
    torch.manual_seed(draw.getrandbits(32))
    strategy = _strategy(draw, n, m)
    weight = _weight(draw, groups, dtype, draw.choice(("normal", "ties")))
    channels, outputs = weight.shape[1] * groups, len(weight)
    stride = draw.choice((1, 2))
    layer = nn.Conv2d(channels, outputs, weight.shape[2:], stride, 1, groups=groups, dtype=dtype)
    layer.weight.data = weight.clone(memory_format=torch.preserve_format)
    fst.convert(layer, strategy)
    optimizer = torch.optim.SGD(layer.parameters(), lr=LR)
    for step in range(STEPS):
        images = torch.randn(2, channels, 6, 5).to(dtype).requires_grad_()
        before = layer.weight.detach().clone()
        with without_onednn(dtype.itemsize == 2):
            output = layer(images)
            grads = torch.randn(output.shape).to(dtype)
            output.backward(grads)
        where = dict(stride=stride, padding=1, dilation=1, groups=groups)
        exact = reference_operands(images, before, grads, **where, strategy=strategy)
        wide = images.detach().double()
        expected = {
            "output": F.conv2d(wide, exact.output_weight, layer.bias.double(), **where),
            "dX": torch.nn.grad.conv2d_input(
                wide.shape, exact.grad_input_weight, grads.double(), **where
            ),
        }
        found = {"output": output.detach(), "dX": images.grad}
        if strategy.grad_weight is None:
            expected["dW"] = torch.nn.grad.conv2d_weight(
                wide, weight.shape, grads.double(), **where
            )
            found["dW"] = layer.weight.grad.clone()
        what = f"step {step}, {strategy.name}, {tuple(weight.shape)}, groups {groups}, {dtype}"
        for name, right in expected.items():
            off = error(found[name], right.detach())
            assert off <= TOLERANCE[dtype], f"{name} is {off:.1e} off: {what}"
        gradient = layer.weight.grad.to(torch.float64, copy=True)
        optimizer.step()
        optimizer.zero_grad()
        pull = strategy.decay * (before.double() - exact.output_weight)
        right = before.double() - LR * (gradient + pull)
        off = error(layer.weight.detach(), right)
        assert off <= TOLERANCE[dtype], f"the new weight is {off:.1e} off: {what}"
