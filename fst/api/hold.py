"""Zeros that stay, in plain layers and under any further training."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fst.basics.selectors import selected
from fst.basics.sharding import ORDER, is_sharded, refuse_sharded
from fst.layers.coverage import gemm_weights
from fst.layers.modules import sparse_layers

_LIVING: weakref.WeakSet[Hold] = weakref.WeakSet()


class Hold:
    """Handle of `hold`; ``remove()`` lets the weights go.

    PyTorch's hooks keep this object, which keeps no weight alive. The next `hold` removes the hooks
    of those whose weights are gone: a hook must not remove itself.

    Attributes:
        masks: parameter name -> mask of the weight, True where it is free.
    """

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        self._weights = {name: weakref.ref(weight) for name, weight in weights.items()}
        self.masks: dict[str, Tensor] = {n: w.detach() != 0 for n, w in weights.items()}
        self._searched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        _LIVING.add(self)

    def remove(self) -> None:
        """Hold nothing any more."""
        for hook in self._hooks:
            hook.remove()
        _LIVING.discard(self)

    def _held(self) -> dict[str, nn.Parameter]:
        """The held weights that still exist."""
        weights = {name: weight() for name, weight in self._weights.items()}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Warn, once for each optimizer, where it has a copy of a held weight."""
        if optimizer in self._searched:
            return
        self._searched.add(optimizer)
        held = {id(weight) for hold in _LIVING for weight in hold._held().values()}
        for parameter in _parameters(optimizer):
            if id(parameter) in held or is_sharded(parameter):
                continue
            for name, mask in self.masks.items():
                if parameter.shape == mask.shape and _has_zeros(parameter, mask):
                    warnings.warn(
                        f"{type(optimizer).__name__} trains a copy of the held weight {name!r}, "
                        "whose zeros are not held: call fst.hold on the copied model, or prepare "
                        "it with inplace=True.",
                        stacklevel=2,
                    )
                    return

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        stepped = set(map(id, _parameters(optimizer)))
        for name, weight in self._held().items():
            if id(weight) not in stepped:
                continue
            mask = self.masks[name]
            if mask.device != weight.device:
                mask = self.masks[name] = mask.to(weight.device)
            weight.masked_fill_(~mask, 0)  # a product with 0 would keep infinities as NaN
            for tensor in optimizer.state.get(weight, {}).values():
                if isinstance(tensor, Tensor) and tensor.shape == weight.shape:
                    tensor.masked_fill_(~mask, 0)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_zeros(weight: Tensor, mask: Tensor) -> bool:
    """True if a weight is zero exactly where ``mask`` is False."""
    return torch.equal(weight != 0, mask.to(weight.device))


def hold(plain: nn.Module, *, include: str | Iterable[str] = "*") -> Hold:
    """Keep the zeros of a folded model at zero under any further training.

    After each step of an optimizer that holds such a weight, and whichever optimizer it is, the
    weights that are zero now are zero again, and so is what the optimizer keeps of them. The weight
    stays a Parameter of its layer, so fake quantization (`torch.ao.quantization.prepare_qat`) sees
    the zeros too: symmetric and affine int8 both represent 0 exactly. Call it once the model is
    folded, before anything replaces its layers: Parameters must stay the same objects. A copy, as
    `prepare_qat` without ``inplace=True`` makes one, is not held; the first step of its optimizer
    warns.

    Args:
        plain: a folded model, or any with zeros; the weights of its convolutions, linear layers
            and attention projections are held.
        include: which weights, by name, such as ``"layer1"`` with all below it or
            ``"*.conv1.weight"``.

    Returns:
        A handle with the masks and ``remove()``. Without it the zeros are held as long as the model
        exists.

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
    for other in list(_LIVING):
        if not other._held():
            other.remove()
    return Hold(chosen)
