"""Layer-wise N:M: which n:m each layer's weight has, for a share of the weights or multiply-adds.

Patterns are rounded from the densities of the Erdős-Rényi-Kernel (Evci et al., "Rigging the
Lottery", ICML 2020, `fst.strategies.rigl`): the layer that is furthest above its density loses
weights first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fst.api.convert import check_layers, choose
from fst.basics.selectors import Selector
from fst.basics.sharding import ORDER, refuse_sharded
from fst.basics.values import check_module, check_number, one_of
from fst.layers.coverage import gemm_weights, group_length, inside_groups, multiply_adds
from fst.rules.masks import MAX_M
from fst.rules.nm import NM
from fst.rules.rule import WeightGroups
from fst.strategies.registry import get_strategy
from fst.strategies.rigl import erk_densities

BUDGETS = ("weights", "multiply-adds")


def patterns(
    model: nn.Module,
    left: float,
    *,
    m: int = 16,
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
        model: dense.
        left: share that remains of the layers which `fst.convert` would make sparse, above 0 and
            at most 1. Less remains where no pattern fits.
        m: size of the groups.
        budget: "weights" or "multiply-adds": ``left`` is a share of them.
        include, exclude, layers: as `fst.convert` takes them.
        group_order: as the strategy's.
        example_input: one batch (N, ...), or a tuple of inputs, to count multiply-adds, for that
            budget.

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
    one_of("budget", budget, BUDGETS)
    NM("weight", 1, m, group_order=group_order)
    check_layers(layers, include)
    modules, skipped = choose(model, get_strategy("srste"), include, exclude, layers)
    if not modules:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"nothing to make sparse in {type(model).__name__}: {reasons or 'empty'}.")
    weights = gemm_weights(model)
    keys = [f"{name}.weight".lstrip(".") for name in modules]
    shapes = [torch.Size([*weights[key].shape, 1, 1][:4]) for key in keys]
    costs = [shape.numel() for shape in shapes]
    if budget == "multiply-adds":
        if example_input is None:
            raise ValueError("example_input=None: budget='multiply-adds' needs one batch to count.")
        macs = multiply_adds(model, example_input)
        costs = [macs[key] for key in keys]
    chosen = _search(shapes, costs, left, m, group_order)
    return {name: f"{n}:{m}" for name, n in zip(modules, chosen, strict=True)}


def _search(
    shapes: Sequence[torch.Size], costs: Sequence[int], left: float, m: int, group_order: str
) -> list[int]:
    """n of each weight (Cout, Cin/groups, kh, kw): they step down from m until the budget is met.

    The next to lose weights is the layer that is furthest above its ERK density, as a ratio.
    """
    steps = [m, *(2**p for p in reversed(range((m - 1).bit_length())))]
    full = [i for i, shape in enumerate(shapes) if inside_groups(shape, 1, m, group_order)]
    shares = {i: {n: _share_kept(shapes[i], n, m, group_order) for n in steps} for i in full}
    goal = left * sum(costs)
    least = sum(costs) - sum(costs[i] * (1 - shares[i][1]) for i in full)
    if least > goal * (1 + 1e-9):
        raise ValueError(
            f"left={left}: 1:{m} in every layer leaves {least / sum(costs):.4g}; a larger m (at "
            f"most {MAX_M}) leaves less."
        )
    densities = dict(zip(full, erk_densities([shapes[i] for i in full], left), strict=True))
    chosen = [m] * len(shapes)
    spent = float(sum(costs))
    while spent > goal * (1 + 1e-9):
        above = {i: shares[i][chosen[i]] / densities[i] for i in full if chosen[i] > 1}
        i = max(above, key=lambda i: above[i])
        after = steps[steps.index(chosen[i]) + 1]
        spent -= costs[i] * (shares[i][chosen[i]] - shares[i][after])
        chosen[i] = after
    return chosen


def _share_kept(shape: torch.Size, n: int, m: int, group_order: str) -> float:
    length = group_length(shape, WeightGroups(n, m, group_order))
    full, rest = divmod(length, m)
    return (full * n + min(n, rest)) / length
