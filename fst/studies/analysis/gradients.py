"""A layer's grad_output under each of SDGP's rules (McDanel et al. 2022, Figures 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fst.ops.prune import prune_grad_output
from fst.rules.nm import NM
from fst.studies.analysis.errors import Error, error_of
from fst.studies.analysis.record import LayerRecord

RULES = ("dense", "random", "magnitude", "magnitude_rescaled")


@dataclass(frozen=True)
class RuleEffect:
    """What a rule makes of the grad_output of one call.

    Attributes:
        maps: the pruned grad_output (N, Cout, P, Q).
        zeros: share of exact zeros.
        l1: its L1 norm over that of the dense one; 1 if both are 0.
        grad_output, grad_input: errors against the dense ones (None where the layer's input needs
            no gradient).
    """

    maps: Tensor
    zeros: float
    l1: float
    grad_output: Error
    grad_input: Error | None


def rule_effects(
    record: LayerRecord,
    n: int = 2,
    m: int = 4,
    rescale: str = "sample_channel",
    generator: torch.Generator | None = None,
) -> dict[str, RuleEffect]:
    """`RuleEffect` of each of `RULES` on the layer's first call, pruned n:m along the channels."""
    layer, call = record.layer, record.calls[0]
    dense = call.grad_output
    exact = call.grad_input
    mass = float(dense.abs().double().sum())
    effects = {}
    for name in RULES:
        pruned = dense
        if name != "dense":
            rule = NM("grad_output", n, m, rule=name, rescale=rescale)
            pruned = prune_grad_output(dense, rule, "grad_input", layer.groups, generator)
        found = None
        if exact is not None:
            reached = [grad_input(layer, call.input, gradient) for gradient in (pruned, dense)]
            found = error_of(reached[:1], reached[1:])
        kept = float(pruned.abs().double().sum())
        effects[name] = RuleEffect(
            pruned,
            float((pruned == 0).double().mean()),
            kept / mass if mass else 1.0,
            error_of([pruned], [dense]),
            found,
        )
    return effects


def grad_input(layer: nn.Conv2d, input: Tensor, grad_output: Tensor) -> Tensor:
    """Wᵀ·dY with the layer's dense weight, whatever its strategy is."""
    weight = layer.weight.detach()
    with torch.enable_grad():
        needed = input.detach().to(weight.dtype).clone().requires_grad_()
        output = nn.Conv2d._conv_forward(layer, needed, weight, None)
    return torch.autograd.grad(output, needed, grad_output.to(output.dtype))[0]
