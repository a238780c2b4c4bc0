"""Numbers for any logger about the pruning of a model in training."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fst.backends.choice import DENSE
from fst.basics.sharding import whole
from fst.layers.modules import SparseLayer, converted_layers

Key = tuple[str, str]  # of a value: what it is, and of which layer
_SEEN: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def _share_of_positions(layer: SparseLayer) -> float | None:
    """The share from which grad_weight was last computed; None where the strategy draws no
    positions, and before the first step.
    """
    rule, decision = layer.strategy.grad_weight, layer.state.record.decisions.get("grad_weight")
    if rule is None or not rule.samples or decision is None:
        return None
    return 1.0 if decision.backend == DENSE else rule.density


@torch.no_grad()
def look(layers: Mapping[str, SparseLayer], masks: dict[str, Tensor]) -> dict[Key, Tensor]:
    """Measure each layer; values stay on its device.

    Args:
        layers: by name.
        masks: those of the last look, which those of this one replace.
    """
    found = {}
    gradients = {n: x.weight.grad for n, x in layers.items() if x.weight.grad is not None}
    norms = torch._foreach_norm(list(gradients.values())) if gradients else []
    for name, norm in zip(gradients, norms, strict=True):
        found["grad_norm", name] = whole(norm)
    for name, layer in layers.items():
        if (mask := layer.output_mask()) is not None:
            found["density", name] = mask.sum() / mask.numel()
            if name in masks and masks[name].shape == mask.shape:
                flips = mask != masks[name].to(mask.device)
                found["mask_flip_rate", name] = flips.sum() / mask.numel()
            masks[name] = mask
        if (share := _share_of_positions(layer)) is not None:
            found["positions", name] = layer.weight.new_tensor(share, dtype=torch.float64)
    return found


def metrics(model: nn.Module, prefix: str = "sparsity/") -> dict[str, float]:
    """Density, mask flip rate and gradient norm, of the whole model and of each converted layer.

    Call it between ``optimizer.step()`` and ``zero_grad()``. Gradients are then clipped, and have
    SR-STE's decay; masks are those of the next step. The call computes each mask and waits for the
    device once, so call it every so many steps.

    Args:
        model: converted.
        prefix: begin of each key.

    Returns:
        "sparsity/density" and "sparsity/density/<layer>": share of weights kept in the output GEMM
        (strategies that prune weights); likewise "mask_flip_rate", the share of the mask that has
        changed since the last call (from the second on), "positions", the share of the output
        positions that grad_weight took in the last step (strategies that draw them), and
        "grad_norm" (where there are gradients). Of the whole model: of norms the norm, of positions
        the mean over layers, of the others the mean over all weights.

    Raises:
        ValueError: no layer of ``model`` is converted.
    """
    layers = converted_layers(model)
    seen = look(layers, _SEEN.setdefault(model, {}))
    values = torch.stack([value.double() for value in seen.values()]).tolist() if seen else ()
    measured: dict[str, dict[str, float]] = {}
    for (what, name), value in zip(seen, values, strict=True):
        measured.setdefault(what, {})[name] = value
    found = {}
    for what, by_layer in measured.items():
        if what == "grad_norm":
            found[prefix + what] = math.hypot(*by_layer.values())
        else:
            sizes = [1 if what == "positions" else layers[n].weight.numel() for n in by_layer]
            weighted = sum(map(operator.mul, by_layer.values(), sizes))
            found[prefix + what] = weighted / sum(sizes)
        found |= {f"{prefix}{what}/{name}": value for name, value in by_layer.items()}
    return found
