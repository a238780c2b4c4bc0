"""Numbers for any logger about the pruning of a model in training."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fst.backends.choice import DENSE
from fst.basics.sharding import whole
from fst.layers.modules import SparseLayer, converted_layers

Layers = Mapping[str, SparseLayer]
Scalars = dict[str, Tensor]  # of layers, by name, on their devices


@torch.no_grad()
def gradient_norms(layers: Layers) -> Scalars:
    """The norm of each weight's gradient; layers without one are omitted."""
    gradients = {n: x.weight.grad for n, x in layers.items() if x.weight.grad is not None}
    norms = torch._foreach_norm(list(gradients.values())) if gradients else []
    return dict(zip(gradients, map(whole, norms), strict=True))


def _share_of_positions(layer: SparseLayer) -> float | None:
    """The share from which grad_weight was last computed; None where the strategy draws no
    positions, and before the first step.
    """
    rule, decision = layer.strategy.grad_weight, layer.state.record.decisions.get("grad_weight")
    if rule is None or not rule.samples or decision is None:
        return None
    return 1.0 if decision.backend == DENSE else rule.density


class MaskWatch:
    """Looks at masks of weights, and remembers them for the next look."""

    def __init__(self) -> None:
        self._seen: Scalars = {}

    @torch.no_grad()
    def look(self, layers: Layers) -> dict[str, Scalars]:
        """For each layer ``density``, ``mask_flip_rate`` and ``positions``.

        The flip rate is the share of the mask that has changed since the last look; ``positions``
        the share of the output positions that grad_weight took in the last step.
        """
        found = {name: layer.output_mask() for name, layer in layers.items()}
        masks = {name: mask for name, mask in found.items() if mask is not None}
        measured = {
            "density": {name: mask.sum() / mask.numel() for name, mask in masks.items()},
            "mask_flip_rate": {
                name: (mask != self._seen[name].to(mask.device)).sum() / mask.numel()
                for name, mask in masks.items()
                if name in self._seen and self._seen[name].shape == mask.shape
            },
            "positions": {
                name: layer.weight.new_tensor(share, dtype=torch.float64)
                for name, layer in layers.items()
                if (share := _share_of_positions(layer)) is not None
            },
        }
        self._seen |= masks
        return measured


def fetch(groups: Mapping[str, Scalars]) -> dict[str, dict[str, float]]:
    """Scalar tensors as floats, with one copy from the device."""
    tensors = [value.double() for group in groups.values() for value in group.values()]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return {what: {name: next(values) for name in group} for what, group in groups.items()}


def totals(layers: Layers, measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One number for each kind: of norms the norm, of shares of the weights the mean over all
    weights, of all else the mean over layers; kinds without values are left out."""
    found = {}
    for what, values in measured.items():
        if not values:
            continue
        if what == "grad_norm":
            found[what] = math.sqrt(sum(value**2 for value in values.values()))
        elif what in ("density", "mask_flip_rate"):
            sizes = {name: layers[name].weight.numel() for name in values}
            found[what] = sum(values[n] * sizes[n] for n in values) / sum(sizes.values())
        else:
            found[what] = sum(values.values()) / len(values)
    return found


_WATCHES: weakref.WeakKeyDictionary[nn.Module, MaskWatch] = weakref.WeakKeyDictionary()


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
        "grad_norm" (where there are gradients).

    Raises:
        ValueError: no layer of ``model`` is converted.
    """
    layers = converted_layers(model)
    watch = _WATCHES.setdefault(model, MaskWatch())
    measured = fetch({**watch.look(layers), "grad_norm": gradient_norms(layers)})
    found = {f"{prefix}{what}": value for what, value in totals(layers, measured).items()}
    for what, values in measured.items():
        found |= {f"{prefix}{what}/{name}": value for name, value in values.items()}
    return found
