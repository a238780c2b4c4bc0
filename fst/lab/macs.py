"""Multiply-adds of each GEMM in a training step, and what a strategy leaves (FST, Figure 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from fst.api.convert import convert
from fst.lab.model import Training
from fst.layers.calls import LayerCall, each_call
from fst.layers.modules import SparseLayer
from fst.ops.conv import as_maps
from fst.rules.strategy import GEMMS, Strategy


class Macs(NamedTuple):
    """Of dense training, and what the strategy leaves of them (a mean where it draws)."""

    dense: int = 0
    left: float = 0.0

    @property
    def share_left(self) -> float:
        """``left`` / ``dense``."""
        return self.left / self.dense


Kinds = tuple[type[nn.Module], ...]
ALL: Kinds = (nn.Conv2d, nn.Linear)
LayerMacs = Mapping[str, Mapping[str, Macs]]  # layer -> GEMM -> those of all its calls


def count_macs(model: nn.Module, run: Callable[[], object], kinds: Kinds = ALL) -> LayerMacs:
    """The multiply-adds of the layers of these ``kinds`` while ``run`` runs ``model``.

    A gradient that neither weight nor input needs costs nothing.
    """
    found: dict[str, dict[str, Macs]] = {}

    def count(call: LayerCall) -> None:
        layer, has_gradient = call.layer, call.output.requires_grad
        computed = {
            "output": True,
            "grad_input": has_gradient and call.input.requires_grad,
            "grad_weight": has_gradient and layer.weight.requires_grad,
        }
        macs = call.output.numel() * layer.weight[0].numel()
        counted = found.setdefault(call.name, dict.fromkeys(GEMMS, Macs()))
        for gemm in filter(computed.get, GEMMS):
            dense, left = counted[gemm]
            kept, whole = _kept(call, gemm)
            counted[gemm] = Macs(dense + macs, left + macs * kept / whole)

    with each_call(model, kinds, count):
        run()
    return found


def count_step(training: Training, strategy: Strategy, kinds: Kinds = ALL) -> LayerMacs:
    """`count_macs` of one training step under a strategy, whose masks are those of its rules."""
    model = copy.deepcopy(training.model).train()
    root = training.root(model)
    convert(root, replace(strategy, schedule=None), **training.selection)
    return count_macs(root, lambda: training.loss(model), kinds)


def total(counted: LayerMacs, gemm: str) -> Macs:
    """The sum over all layers."""
    dense, left = zip(*(of_layer[gemm] for of_layer in counted.values()), strict=True)
    return Macs(sum(dense), sum(left))


def _kept(call: LayerCall, gemm: str) -> tuple[float, float]:
    """(kept, total) parts of a GEMM."""
    layer = call.layer
    rule = layer.strategy.rule(gemm) if isinstance(layer, SparseLayer) else None
    if rule is None:
        return 1, 1
    height, width = call.output.shape[-2:]
    if isinstance(layer, nn.Linear):
        height, width = as_maps(call.input.shape[:-1])[-2:]
    kept = rule.kept(gemm, layer.weight_as_conv().shape, layer.conv_groups, height, width)
    if kept is not None:
        return kept
    if gemm != "output" and not rule.as_output:
        return rule.density, 1
    mask = layer.output_mask()
    return (1, 1) if mask is None else (int(mask.count_nonzero()), mask.numel())
