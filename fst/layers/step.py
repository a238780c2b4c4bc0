"""The work at every optimizer's step: the decay before it, the count of steps after it.

PyTorch calls these hooks around each step of any optimizer. There the gradients are complete,
whatever the number of calls, micro-batches and layers that share the weight, and unscaled; an
optimizer that unscales them itself says by what. Until then ``weight.grad`` is the loss's alone.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fst.basics.errors import UsageError
from fst.basics.sharding import are_sharded, is_managed, is_sharded, whole
from fst.layers.modules import SparseLayer, living_layers
from fst.ops.prune import add_residual
from fst.rules.schedule import check_descends
from fst.rules.strategy import Strategy

Layers = list[SparseLayer]
STEP = Optimizer.profile_hook_step(lambda *_: None).__code__  # calls the hooks around a step


def decay(layer: SparseLayer, weight: Tensor, strategy: Strategy, scale: Tensor | None) -> None:
    """Pull the weight towards S(W) (Zhou et al. 2021, Eq. 9; "decoupled": FST, Eq. 6), in place.

    ``scale``: by what the optimizer will divide the gradients, if it does.
    """
    mask = None
    if layer.transient.decay_mask is not None:
        of, version, remembered = layer.transient.decay_mask
        # Else it is the mask of other values; FSDP gathers a weight of its own for each call.
        if (of is weight and version == weight._version) or is_managed(layer):
            mask = remembered
    mask = layer.output_mask() if mask is None else mask
    assert mask is not None
    if mask.shape != weight.shape or mask.device != weight.device or type(weight) is not Parameter:
        mask = layer.shaped_as_weight(mask)
    if strategy.decay_mode == "decoupled":
        add_residual(weight.detach(), weight, mask, -strategy.decay)
    else:
        assert weight.grad is not None
        add_residual(weight.grad, weight, mask, strategy.decay, scale)


def is_skipped(optimizer: Optimizer, layers: Layers) -> bool:
    """True if the step must not count: a GradScaler has found infinities, or nothing trained.

    Optimizers that unscale gradients themselves are called for infinities all the same; others are
    not. Nobody waits for a GPU to say so: there such a step counts, and "decoupled" decay acts in
    it. `torch.distributed.checkpoint.state_dict` steps with a learning rate and gradients of zero,
    so that an optimizer has a state to save or to load into.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is not None and not found.is_cuda and bool(found):
        return True
    if any(not _is_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    weights = [layer.stored_weight() for layer in layers]
    gradients = [w.grad for w in weights if w is not None and w.grad is not None]
    return bool(gradients) and not any(bool(whole(grad.norm())) for grad in gradients)


def _is_zero(rate: float | Tensor | None) -> bool:
    """True if a learning rate is known to be 0 without asking a device."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False
    return rate is not None and not rate


def steps_under_way(optimizer: Optimizer) -> int:
    """The steps of this optimizer that have not returned.

    There are two where a class's ``step`` calls that of its base class: PyTorch calls the hooks
    around both, if the base class has instances too.
    """
    if torch.compiler.is_compiling():  # frames cannot be traced
        return 1
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        found += frame.f_code is STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found


@torch.no_grad()
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if steps_under_way(optimizer) > 1:
        return None
    layers = [
        layer
        for layer in held_by(optimizer)
        if layer.transient.stepping is None or not _is_nested(layer, optimizer)
    ]
    if is_skipped(optimizer, layers):
        return None
    _warn_of_lost_state(layers, optimizer)
    stepping = weakref.ref(optimizer)
    for layer in layers:
        transient = layer.transient
        if transient.frozen_block is not None and transient.frozen is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step changes the weight of layer "
                f"{layer.layer_name!r} inside fst.frozen(model): step outside of it."
            )
        transient.stepping, transient.has_gradient, transient.acted = stepping, False, False
    if not layers:
        return None
    return with_gradients(
        args, kwargs, lambda first: _decay_once(layers, optimizer, decoupled=first)
    )


def _warn_of_lost_state(layers: Layers, optimizer: Optimizer) -> None:
    """Warn where a training goes on with loaded weights, but without what layers remember.

    It goes on where steps were counted, here or by the layer whose weight was loaded, or where the
    optimizer has a state of the weight before its first step. A training that begins with the
    weights of a dense model has nothing to remember.
    """
    lost = [
        layer
        for layer in layers
        if layer.transient.loaded_step is not None and not layer.transient.has_loaded_state
        if layer.strategy.keeps_masks or layer.strategy.has_memory
        if layer.transient.loaded_step or layer.state.step or _state_of(layer, optimizer)
    ]
    for layer in layers:
        layer.transient.loaded_step, layer.transient.has_loaded_state = None, False
    if lost:
        what = "masks" if lost[0].strategy.keeps_masks else "gradients of the last step"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warnings.warn(
            f"layer {lost[0].layer_name!r}{more}: the weights were loaded, and not the {what} that "
            f"strategy {lost[0].strategy.name!r} remembers, so this training does not go on "
            "exactly where it stopped. Save fst.sparsity_state(model) beside the state_dict, and "
            "call fst.load_sparsity_state(model, state) where the state_dict is loaded.",
            stacklevel=2,
        )


def _state_of(layer: SparseLayer, optimizer: Optimizer) -> Any:
    weight = layer.stored_weight()
    return None if weight is None else optimizer.state.get(weight)


def with_gradients(
    args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[bool], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call ``act(first)`` once a step's gradients are complete.

    That is now, or after each call of the closure among the step's arguments, which makes them: the
    arguments are then returned with a closure that does both.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        act(True)
        return None
    first = True

    def acting() -> Any:
        nonlocal first
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            act(first)
        first = False
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": acting}
    return (args[0], acting, *args[2:]), kwargs


def _is_nested(layer: SparseLayer, optimizer: Optimizer) -> bool:
    """True if this step is a part of another optimizer's step of the same weight."""
    stepping = layer.transient.stepping
    other = None if stepping is None else stepping()
    if other is None or other is optimizer:
        return False
    return steps_under_way(other) > 0  # an exception may have ended it


def _decay_once(layers: Layers, optimizer: Optimizer, *, decoupled: bool) -> None:
    """The decay of each weight that has a gradient; layers that share one share its decay.

    Raises:
        RuntimeError: the optimizer climbs the gradient that the decay is in, or compares losses
            that do not contain it; or "decoupled" decay finds no stored weight.
    """
    scale, seen = getattr(optimizer, "grad_scale", None), set()
    is_refused = isinstance(optimizer, LBFGS) or any(
        group.get("maximize") for group in optimizer.param_groups
    )
    for layer in layers:
        weight, strategy, transient = _weight_of(layer), layer.strategy, layer.transient
        if weight is None or weight.grad is None:
            continue
        transient.has_gradient = True
        if strategy.schedule is not None:
            strategy = layer.current_strategy
        if not strategy.decay:
            continue
        is_stored = transient.decay_mask is not None or layer.multiplies_parameter
        if strategy.decay_mode == "gradient":
            if is_refused:
                _check_takes_decay(layer, optimizer, weight)
        elif not is_stored:
            raise UsageError(
                f"layer {layer.layer_name!r}: decay_mode='decoupled' works on a stored weight, and "
                "this one is computed from other parameters: use decay_mode='gradient'."
            )
        if not is_stored or id(weight) in seen:
            continue
        if transient.decay_mask is None and layer.is_too_small:
            continue
        if decoupled or strategy.decay_mode == "gradient":
            seen.add(id(weight))
            decay(layer, weight, strategy, scale)


def _check_takes_decay(layer: SparseLayer, optimizer: Optimizer, weight: Tensor) -> None:
    check_descends(optimizer, weight)
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            f"LBFGS compares losses, which lack the decay of layer {layer.layer_name!r} "
            "that decay_mode='gradient' adds to gradients: convert the model with "
            "decay_mode='decoupled' or decay=0."
        )


def _weight_of(layer: SparseLayer) -> Tensor | None:
    """`SparseLayer.stored_weight`, at little cost where it is a Parameter of the layer."""
    weight = layer._parameters.get("weight")
    return layer.stored_weight() if weight is None else weight


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if steps_under_way(optimizer) > 1:
        return
    for layer in living_layers():
        transient = layer.transient
        if transient.stepping is None or transient.stepping() is not optimizer:
            continue
        transient.stepping = transient.decay_mask = None
        if transient.has_gradient:
            if transient.start is not None and not transient.acted:
                raise UsageError(
                    f"{type(optimizer).__name__}.step has changed the weight of layer "
                    f"{layer.layer_name!r}, whose strategy {layer.strategy.name!r} is attached to "
                    "another optimizer: call remove() of what fst.attach returned, and attach the "
                    "model to the optimizer that trains it."
                )
            layer.state.end_step(transient.calls)
            transient.calls = 0
            if layer.state.record.moved:
                layer.state.record.moved = False
                transient.plans.clear()


def held_by(optimizer: Optimizer) -> Layers:
    """The living layers whose weight is among the optimizer's parameters."""
    layers = living_layers()
    if not layers:
        return []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if are_sharded(parameters):
        _check_resharded(layers, optimizer, parameters)
    held = set(map(id, parameters))
    return [
        layer
        for layer in layers
        if id(layer._parameters.get("weight")) in held or id(_weight_of(layer)) in held
    ]


def _check_resharded(layers: Layers, optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Raise RuntimeError where FSDP has left a weight gathered whose shards the optimizer holds.

    Such shards are no layer's weight, but have the gathered one's shape.
    """
    weights = set(map(id, (layer.stored_weight() for layer in layers)))
    loose = {p.shape for p in parameters if is_sharded(p) and id(p) not in weights}
    for layer in layers:
        weight = layer.stored_weight()
        if (
            weight is None
            or is_sharded(weight)
            or not is_managed(layer)
            or not layer.transient.calls
        ):
            continue
        if weight.requires_grad and weight.shape in loose:
            raise UsageError(
                f"{type(optimizer).__name__}.step: the weight of layer {layer.layer_name!r} is "
                "gathered, and the optimizer would change shards that it is no longer made of: "
                "call reshard() of its FSDP module first (after a forward pass without a backward "
                "pass, or set_reshard_after_backward(False))."
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
