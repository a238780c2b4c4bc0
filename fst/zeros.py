"""Zeros that stay, in plain layers and under any further training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fst.basics.selectors import selected
from fst.basics.sharding import ORDER, refuse_sharded
from fst.layers.coverage import gemm_weights
from fst.layers.modules import sparse_layers


class Hold:
    """Handle of `hold`; ``remove()`` lets the weights go.

    Attributes:
        masks: parameter name -> mask of the weight, True where it is free.
    """

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        self._weights = weights
        self.masks: dict[str, Tensor] = {n: w.detach() != 0 for n, w in weights.items()}
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Hold nothing any more."""
        self._hook.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self._weights.items():
            if id(weight) not in stepped:
                continue
            mask = self.masks[name]
            if mask.device != weight.device:
                mask = self.masks[name] = mask.to(weight.device)
            weight.mul_(mask)
            for tensor in optimizer.state.get(weight, {}).values():
                if isinstance(tensor, Tensor) and tensor.shape == weight.shape:
                    tensor.mul_(mask)


def hold(plain: nn.Module, *, include: str | Iterable[str] = "*") -> Hold:
    """Keep the zeros of a folded model at zero under any further training.

    After each step of an optimizer that holds such a weight, and whichever optimizer it is, the
    weights that are zero now are zero again, and so is what the optimizer keeps of them. The weight
    stays a Parameter of its layer, so fake quantization (`torch.ao.quantization.prepare_qat`) sees
    the zeros too: symmetric and affine int8 both represent 0 exactly. Call it once the model is
    folded, before anything replaces its layers: Parameters must stay the same objects.

    Args:
        plain: a folded model, or any with zeros; the weights of its convolutions, linear layers
            and attention projections are held.
        include: which weights, by name, such as ``"layer1"`` with all below it or
            ``"*.conv1.weight"``.

    Returns:
        A handle with the masks and ``remove()``.

    Raises:
        ValueError: a layer is converted (fold the model first), no weight has a zero, or a pattern
            matches no weight.
        TypeError: ``plain`` is no module.
    """
    for name in sparse_layers(plain):
        raise ValueError(
            f"layer {name!r} is converted, and prunes by itself: fst.fold the model first."
        )
    refuse_sharded(plain, "hold", ORDER)
    weights = {n: w for n, w in gemm_weights(plain).items() if isinstance(w, nn.Parameter)}
    names = selected("include", include, weights, "weight")
    chosen = {n: w for n, w in weights.items() if n in names and bool((w == 0).any())}
    if not chosen:
        raise ValueError(
            f"{type(plain).__name__} has no zero in a weight of include={include!r}: nothing to "
            "hold; fst.fold a converted model first."
        )
    return Hold(chosen)
