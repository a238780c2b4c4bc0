"""Layer-wise N:M: which n:m each layer's weight has, for a share of the weights or multiply-adds.

"erk" is rounded from the densities of the Erdős-Rényi-Kernel (Evci et al., "Rigging the Lottery",
ICML 2020, `fst.strategies.rigl`): the layer that is furthest above its density loses weights first.

"domino" orders layers by the criterion of Sun et al., "DominoSearch: Find Layer-Wise Fine-Grained
N:M Sparse Schemes from Dense Neural Networks", NeurIPS 2021. Official code:
github.com/NM-sparsity/DominoSearch (search/find_mix_from_dense_imagenet.py,
devkit/sparse_ops/sparse_ops.py). There a penalty f·w shrinks the weights of a trained dense model
while it is trained on. A layer reaches n:m when 3/4 of its groups have at most n magnitudes above
their threshold, which is the mean of the group's smaller half before the search. f of each layer is
the mean of two parts, which change with every step of the search: the layer's multiply-adds, and
how far it is from its ERK density, both over the largest of all layers. Here the penalty acts
alone: the model is not trained on, so the search is exact, takes one pass over the weights and
needs no data. Groups of fewer than m stay dense; the code forms groups across the kernel there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fst.basics.selectors import Selector
from fst.basics.sharding import ORDER, refuse_sharded
from fst.basics.values import check_module, check_number, one_of
from fst.conversion import check_layers, choose
from fst.layers.coverage import gemm_weights, inside_groups, multiply_adds
from fst.rules.masks import MAX_M
from fst.rules.nm import NM
from fst.strategies.registry import get_strategy
from fst.strategies.rigl import erk_densities

CRITERIA = ("erk", "domino")
BUDGETS = ("weights", "multiply-adds")
VOTES = 0.75  # share of a layer's groups that must agree
NEVER = 1e30  # what no shrinking reaches: of a group whose smaller half is zero


class _Layer(NamedTuple):
    """A layer that is to be pruned: its weight, and its multiply-adds."""

    weight: Tensor
    macs: int
    group_order: str

    def left(self, n: int, m: int) -> float:
        """Share of the weight that n:m keeps."""
        rule = NM("weight", n, m, group_order=self.group_order)
        kept, whole = rule.kept("output", self.shape, 1, 1, 1)
        return kept / whole

    @property
    def shape(self) -> torch.Size:
        """(Cout, Cin/groups, kh, kw)"""
        return torch.Size([*self.weight.shape, 1, 1][:4])


def patterns(
    model: nn.Module,
    left: float,
    *,
    m: int = 16,
    criterion: str = "erk",
    budget: str = "weights",
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    layers: str = "conv",
    group_order: str = "channel",
    example_input: Tensor | tuple[Any, ...] | None = None,
) -> dict[str, str]:
    """Choose an n:m for each layer so that a share ``left`` of the model remains.

    `fst.convert` takes the result. n is m, or a power of two below m. ::

        fst.convert(model, "srste", patterns=fst.patterns(model, 0.2))

    Args:
        model: dense; for "domino" it has been trained.
        left: share that remains of the layers which `fst.convert` would make sparse, above 0 and
            at most 1. Less remains where no pattern fits.
        m: size of the groups; DominoSearch's is 16.
        criterion: "erk" or "domino", see the module.
        budget: "weights" or "multiply-adds": ``left`` is a share of them.
        include, exclude, layers: as `fst.convert` takes them.
        group_order: as the strategy's.
        example_input: one batch (N, ...), or a tuple of inputs, to count multiply-adds: for
            "domino" and for the budget of "multiply-adds".

    Returns:
        Name of each layer -> "n:m". "m:m" is dense. A layer whose groups are all shorter is dense.

    Raises:
        ValueError: an argument is none of those, nothing is to be made sparse, or the sparsest
            patterns leave more than ``left``.
        TypeError: ``model`` is not a module.
    """
    check_module(model)
    refuse_sharded(model, "patterns", ORDER)
    check_number("left", left, "(0, 1]")
    one_of("criterion", criterion, CRITERIA)
    one_of("budget", budget, BUDGETS)
    NM("weight", 1, m, group_order=group_order)
    check_layers(layers, include)
    if example_input is None and (criterion == "domino" or budget == "multiply-adds"):
        raise ValueError(
            f"example_input=None: criterion={criterion!r} with budget={budget!r} counts "
            "multiply-adds; give one batch."
        )
    modules, skipped = choose(model, get_strategy("srste"), include, exclude, layers)
    if not modules:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"nothing to make sparse in {type(model).__name__}: {reasons or 'empty'}.")
    macs = {} if example_input is None else multiply_adds(model, example_input)
    weights = gemm_weights(model)
    found = [
        _Layer(weights[key].detach(), macs.get(key, 0), group_order)
        for key in (f"{name}.weight".lstrip(".") for name in modules)
    ]
    costs = [x.macs if budget == "multiply-adds" else x.weight.numel() for x in found]
    chosen = _search(found, costs, left, m, criterion)
    return {name: f"{n}:{m}" for name, n in zip(modules, chosen, strict=True)}


def _search(
    layers: Sequence[_Layer], costs: Sequence[int], left: float, m: int, criterion: str
) -> list[int]:
    """n of each layer: layers step down from m, one at a time, until the budget is met."""
    steps = [m, *(2**p for p in reversed(range((m - 1).bit_length())))]
    full = [i for i, x in enumerate(layers) if inside_groups(x.shape, 1, m, x.group_order)]
    chosen = [m] * len(layers)
    goal = left * sum(costs)
    shares = {i: {n: layers[i].left(n, m) for n in steps} for i in full}
    least = sum(costs) - sum(costs[i] * (1 - shares[i][1]) for i in full)
    if least > goal * (1 + 1e-9):
        raise ValueError(
            f"left={left}: 1:{m} in every layer leaves {least / sum(costs):.4g}; a larger m (at "
            f"most {MAX_M}) leaves less."
        )
    densities = erk_densities([layers[i].shape for i in full], left)
    next_of: Callable[[Sequence[int], Sequence[float]], int]
    next_of = functools.partial(_by_erk, densities)
    if criterion == "domino":
        next_of = _Domino(layers, full, densities, m)
    spent = float(sum(costs))
    while spent > goal * (1 + 1e-9):
        after = [steps[steps.index(chosen[i]) + 1] if chosen[i] > 1 else 0 for i in full]
        shares_now = [shares[i][chosen[i]] for i in full]
        index = next_of(after, shares_now)
        i = full[index]
        spent -= costs[i] * (shares[i][chosen[i]] - shares[i][after[index]])
        chosen[i] = after[index]
    return chosen


def _by_erk(densities: Sequence[float], after: Sequence[int], shares: Sequence[float]) -> int:
    """The layer that is furthest above its ERK density, as a ratio."""
    return max((i for i, n in enumerate(after) if n), key=lambda i: shares[i] / densities[i])


class _Domino:
    """The layer whose weights, shrinking by f·w, are the first to reach their next pattern."""

    def __init__(
        self, layers: Sequence[_Layer], full: Sequence[int], densities: Sequence[float], m: int
    ) -> None:
        self.densities = densities
        self.macs = [layers[i].macs for i in full]
        self.needs = [_shrinking(layers[i], m) for i in full]
        self.shrunk = [0.0] * len(full)

    def __call__(self, after: Sequence[int], shares: Sequence[float]) -> int:
        left = [i for i, n in enumerate(after) if n]
        rates = self._rates(shares)
        if not any(rates[i] > 0 for i in left):  # they are sparser than ERK wants already
            rates = [max(1.0, macs * s) for macs, s in zip(self.macs, shares, strict=True)]
        waits = {
            i: max(0.0, self.needs[i][after[i]] - self.shrunk[i]) / rates[i]
            for i in left
            if rates[i] > 0
        }
        first = min(waits, key=lambda i: waits[i])
        for i, rate in enumerate(rates):
            self.shrunk[i] += waits[first] * rate
        return first

    def _rates(self, shares: Sequence[float]) -> list[float]:
        work = [macs * share for macs, share in zip(self.macs, shares, strict=True)]
        excess = [share - goal for share, goal in zip(shares, self.densities, strict=True)]
        most_work, most_excess = max(work), max(map(abs, excess))
        scale = most_excess if max(excess) > 0 else math.inf  # all are as sparse as ERK wants
        return [(w / most_work + e / scale) / 2 for w, e in zip(work, excess, strict=True)]


def _shrinking(layer: _Layer, m: int) -> dict[int, float]:
    """For each n < m: ln of the factor by which the weights must shrink to reach n:m."""
    weight = layer.weight.float().abs()
    flat = weight.flatten(1) if layer.group_order == "im2col" else weight.movedim(1, -1)
    flat = flat[..., : flat.shape[-1] // m * m].reshape(-1, m)
    sizes = flat.sort(-1, descending=True).values
    thresholds = sizes[:, m - m // 2 :].mean(-1)
    votes = math.ceil(VOTES * len(sizes))
    needs = {}
    for n in range(1, m):
        logs = (sizes[:, n] / thresholds).log()
        logs = logs.nan_to_num(nan=-math.inf, posinf=NEVER)  # 0 / 0 is small enough
        needs[n] = float(logs.kthvalue(votes).values)
    return needs
