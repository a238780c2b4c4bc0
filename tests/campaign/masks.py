"""N:M masks of grouped convolutions in every precision, against the reference's, group by group."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fst
from fst.backends.choice import compute
from fst.ops.operands import PruneWeight
from tests.campaign.shared import Checks
from tests.cases import TOLERANCE
from tests.oracle.conv import reference_operands

PATTERNS = ((2, 4), (1, 4), (1, 3), (3, 5), (2, 8), (4, 8))
STRATEGIES = ("srste", "fst", "fst_w", "tsm")


def _wild(weight: Tensor) -> Tensor:
    values = torch.tensor([math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 2.0, 0.5])
    return values[torch.randint(len(values), weight.shape)].to(weight.dtype)


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda weight: weight,
    "ties": lambda weight: (weight * 2).round() / 2,
    "equal": torch.ones_like,
    "zero": torch.zeros_like,
    "tiny": lambda weight: weight * torch.finfo(weight.dtype).tiny,  # subnormal numbers
    "large": lambda weight: weight * (torch.finfo(weight.dtype).max / 8),
    "wild": _wild,
}


def checks() -> Checks:
    """Each number of groups, dtype and pattern."""
    crossing = itertools.product(range(1, 5), TOLERANCE, PATTERNS)
    return [
        (f"{groups}-{str(dtype)[6:]}-{n}:{m}", 12, partial(_check, groups, dtype, n, m))
        for groups, dtype, (n, m) in crossing
    ]


def _check(groups: int, dtype: torch.dtype, n: int, m: int, draw: random.Random) -> None:
    """S(W) and S(Wᵀ) are the weight's own bits where the reference keeps, and zero elsewhere."""
    torch.manual_seed(draw.getrandbits(32))
    family, name = draw.choice(list(FAMILIES)), draw.choice(STRATEGIES)
    if name == "tsm":  # transposable patterns of 2:4 are those that the reference enumerates
        strategy = fst.get_strategy("tsm", interval=1)
        # sums of such magnitudes have no one order
        family = "normal" if family in ("large", "wild") else family
    else:
        options = {"group_order": "im2col"} if name == "srste" and draw.random() < 0.3 else {}
        strategy = fst.get_strategy(name, n=n, m=m, **options)
    kernel = draw.choice(((1, 1), (3, 3), (1, 3), (2, 2)))
    weight = torch.randn(groups * draw.randint(1, 11), draw.randint(1, 11), *kernel).to(dtype)
    weight = FAMILIES[family](weight)
    if draw.random() < 0.4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    pruned = compute(PruneWeight(weight, strategy, groups, dtype))
    images, grads = (
        torch.zeros(1, weight.shape[1] * groups, *kernel),
        torch.zeros(1, len(weight), 1, 1),
    )
    expected = reference_operands(images, weight, grads, groups=groups, strategy=strategy)
    for found, right in (
        (pruned.output, expected.output_weight),
        (pruned.grad_input, expected.grad_input_weight),
    ):
        # an infinity that is dropped stays visible, as NaN
        right = right.masked_fill((right == 0) & ~weight.isfinite(), math.nan)
        equal = (found == right) | (found.isnan() & right.isnan())
        what = f"S(W): {name}, {family}, {tuple(weight.shape)}, groups {groups}"
        assert found.dtype == dtype and equal.all(), what
