"""What a layer needs before it trains: exceptions that say what to call, or what to leave."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from fst.rules.nm import Transposable

if TYPE_CHECKING:
    from fst.layers.modules import SparseLayer


def attachment(layer: SparseLayer) -> None:
    """Raise RuntimeError unless a layer whose strategy has a schedule is attached."""
    if layer.start_schedule is None:
        raise RuntimeError(
            f"layer {layer.layer_name!r}: strategy {layer.strategy.name!r} works at the "
            "optimizer's steps; call fst.attach(model, optimizer) before training."
        )


def decay(layer: SparseLayer, dtype: torch.dtype) -> None:
    """Raise RuntimeError if the decay would not happen; warn if it may be too weak."""
    if layer.strategy.decay_mode == "decoupled":
        if not layer.attached:
            raise RuntimeError(
                f"layer {layer.layer_name!r}: decay_mode='decoupled' works at the optimizer's "
                "step; call fst.attach(model, optimizer) before training."
            )
    elif dtype == torch.float16 != layer.weight.dtype and layer.scale_decay is None:
        warnings.warn(
            "float16 autocast without fst.set_grad_scaler(model, scaler): if the loss is "
            "scaled, SR-STE's decay is too weak by that scale.",
            stacklevel=5,
        )


def traceable_state(layer: SparseLayer) -> None:
    """Raise RuntimeError where training changes state that torch.compile cannot trace."""
    if not layer.training:
        return
    strategy, rule = layer.strategy, layer.strategy.output
    state = ""
    if strategy.schedule is not None:
        state = f"masks that {strategy.name!r} changes between steps are"
    elif strategy.has_memory:
        state = "the previous step's gradients are"
    elif isinstance(rule, Transposable) and rule.interval > 1:
        state = f"a mask kept for interval={rule.interval} steps is"
    if state:
        advice = " or use interval=1" if "interval" in state else ""
        raise RuntimeError(
            f"layer {layer.layer_name!r}: {state} state that torch.compile cannot trace; "
            f"train uncompiled{advice}."
        )
