"""What the methods since 2021 keep of their operands, literally: one group after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fst.rules.nm import NM, UNBIASED, TwicePruned
from fst.rules.rule import Rule
from fst.rules.values import Fading, MultiAxis, SoftThreshold


def is_method(rule: Rule) -> bool:
    """Whether `operand` knows the rule."""
    unbiased = isinstance(rule, NM) and rule.rule in UNBIASED
    return unbiased or isinstance(rule, TwicePruned | Fading | MultiAxis | SoftThreshold)


def inclusion(magnitudes: list[float], n: int) -> list[float]:
    """Water-filling (Chmiel et al. 2023): min(1, c·|a|) with the sum n, or 1 for all that is not 0
    where that is fewer than n.
    """
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(magnitudes)) if i not in full]
        total = math.fsum(magnitudes[i] for i in rest)
        c = (n - len(full)) / total if total else 0.0
        over = {i for i in rest if magnitudes[i] and c * magnitudes[i] >= 1 - 1e-12}
        if not over:
            return [1.0 if i in full else c * v for i, v in enumerate(magnitudes)]
        full |= over


def approximate_inclusion(magnitudes: list[float]) -> list[float]:
    """Of "approx-MVUE": one element by its share, another one by its share of the rest."""
    values = [v + 1.19209e-07 for v in magnitudes]
    whole = math.fsum(values)
    return [
        v / whole
        + math.fsum(other / whole * v / (whole - other) for j, other in enumerate(values) if j != i)
        for i, v in enumerate(values)
    ]


def _lines(tensor: Tensor, dim: int) -> tuple[list[list[float]], torch.Size]:
    moved = tensor.movedim(dim, -1)
    return moved.reshape(-1, moved.shape[-1]).tolist(), moved.shape


def _unbiased(rule: NM, tensor: Tensor, mask: Tensor, dim: int) -> Tensor:
    """a/π where the draw has kept a."""
    lines, shape = _lines(tensor, dim)
    kept, _ = _lines(mask.to(torch.bool), dim)
    for line, flags in zip(lines, kept, strict=True):
        for start in range(0, len(line), rule.m):
            group = line[start : start + rule.m]
            padded = [abs(v) for v in group] + [0.0] * (rule.m - len(group))
            if rule.rule == "mvue":
                chances = inclusion(padded, rule.n)
            else:
                chances = approximate_inclusion(padded)
            for i, value in enumerate(group):
                line[start + i] = value / chances[i] if flags[start + i] else 0.0
    return torch.tensor(lines, dtype=torch.float64).reshape(shape).movedim(-1, dim)


def _places(rule: NM, shape: torch.Size) -> list[list[tuple[int, ...]]]:
    """The indices of each group of a weight (Cout, Cin/groups, kh, kw) in output."""
    outputs, inputs, height, width = shape
    lines = []
    if rule.group_order == "im2col":
        for o in range(outputs):
            lines.append(
                [(o, *rest) for rest in itertools.product(*map(range, (inputs, height, width)))]
            )
    else:
        for o, i, j in itertools.product(range(outputs), range(height), range(width)):
            lines.append([(o, c, i, j) for c in range(inputs)])
    return [line[k : k + rule.m] for line in lines for k in range(0, len(line), rule.m)]


def _by_size(places: list[tuple[int, ...]], weight: Tensor) -> list[tuple[int, ...]]:
    return sorted(places, key=lambda place: (-abs(float(weight[place])), places.index(place)))


def _soft(rule: SoftThreshold, weight: Tensor) -> Tensor:
    result = torch.zeros_like(weight)
    for places in _places(rule, weight.shape):
        order = _by_size(places, weight)
        threshold = abs(float(weight[order[rule.n]])) if len(order) > rule.n else 0.0
        for place in order[: rule.n]:
            result[place] = math.copysign(abs(float(weight[place])) - threshold, weight[place])
    factor = None if rule.factor is None else float(rule.factor)
    if factor is None:
        squares = float((result * result).sum())
        factor = float((weight * result).sum()) / squares if squares else 1.0
    return factor * result


def _fading(rule: Fading, weight: Tensor) -> Tensor:
    result = weight.clone()
    for places in _places(rule, weight.shape):
        for place in _by_size(places, weight)[rule.n :]:
            result[place] *= rule.rest
    return result


def _importance(rule: MultiAxis, places: list[tuple[int, ...]], weight: Tensor) -> list[float]:
    """MaxQ's factor of weights that are compared with each other, in their order."""
    order = _by_size(places, weight)
    left = len(places) - int((rule.m - rule.n) / rule.m * len(places))
    border = [abs(float(weight[place])) for place in order[max(0, left - 1) : left + 1]]
    threshold = math.fsum(border) / len(border)
    kept = set(order[:left])
    return [
        1 / (1 + math.exp((threshold - abs(float(weight[p]))) / 0.01)) if p in kept else 0.0
        for p in places
    ]


def _multi_axis(rule: MultiAxis, weight: Tensor) -> Tensor:
    if rule.n == rule.m:
        return weight
    groups = _places(rule, weight.shape)
    norms = [math.fsum(abs(float(weight[place])) for place in places) for places in groups]
    count = int(rule.dense_groups * len(groups))
    dense = set(sorted(range(len(groups)), key=lambda g: (norms[g], g))[:count])
    result, factors = torch.zeros_like(weight), torch.ones_like(weight)
    indices = list(itertools.product(*map(range, weight.shape)))
    compared = [[p for p in indices if p[0] == o] for o in range(len(weight))]
    if weight.shape[2:].numel() > 1:
        for i, j in itertools.product(*map(range, weight.shape[2:])):
            compared.append([p for p in indices if p[2:] == (i, j)])
    for places in compared:
        for place, factor in zip(places, _importance(rule, places, weight), strict=True):
            factors[place] += factor
    for g, places in enumerate(groups):
        for place in places if g in dense else _by_size(places, weight)[: rule.n]:
            result[place] = weight[place] * factors[place]
    return result


def _twice(rule: TwicePruned, weight: Tensor, groups: int) -> Tensor:
    """``weight`` is what output multiplies with."""
    result, size = torch.zeros_like(weight), len(weight) // groups
    order = range(size) if rule.order is None else rule.order.tolist()
    for g, rest in itertools.product(
        range(groups), itertools.product(*map(range, weight.shape[1:]))
    ):
        line = [(g * size + o, *rest) for o in order]
        for start in range(0, size, rule.m):
            for place in _by_size(line[start : start + rule.m], weight)[: rule.n]:
                result[place] = weight[place]
    return result


def operand(
    rule: Rule, gemm: str, tensor: Tensor, draws: Mapping[str, Tensor | int], groups: int
) -> Tensor:
    """What `pruned_operand` of `tests.oracle.rules` returns, for the rules of `is_method`."""
    if isinstance(rule, SoftThreshold):
        return _soft(rule, tensor)
    if isinstance(rule, Fading):
        return _fading(rule, tensor)
    if isinstance(rule, MultiAxis):
        return _multi_axis(rule, tensor)
    if isinstance(rule, TwicePruned):
        return _twice(rule, tensor, groups)
    assert isinstance(rule, NM)
    if rule.n == rule.m:
        return tensor
    mask = torch.as_tensor(draws[gemm], device="cpu")
    if gemm == "grad_input" and rule.group_order == "channel":
        parts = zip(tensor.chunk(groups, 1), mask.chunk(groups, 1), strict=True)
        return torch.cat([_unbiased(rule, part, kept, 1) for part, kept in parts], 1)
    return _unbiased(rule, tensor.flatten(2), mask.flatten(2), 2).reshape(tensor.shape)
