"""What training needs besides the state_dict, and the strategies' share of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fst.modules import SparseLayer, sparse_layers


def sparsity_state(model: nn.Module) -> dict[str, Any]:
    """Counters and kept masks of all converted layers, as plain data for a checkpoint.

    The state_dict stays that of the dense model; this belongs beside it.
    """
    return {
        name: {
            "strategy": str(layer.strategy),
            "step": layer.step,
            "kept_mask": None if layer.kept_mask is None else layer.kept_mask.cpu(),
        }
        for name, layer in sparse_layers(model).items()
    }


def load_sparsity_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `sparsity_state` returned.

    Raises:
        ValueError: the state belongs to other layers or to another strategy.
    """
    layers = _layers(model)
    fields = {"strategy", "step", "kept_mask"}
    if not isinstance(state, Mapping) or not all(
        isinstance(entry, Mapping) and fields <= entry.keys() for entry in state.values()
    ):
        raise ValueError(f"state={state!r:.200} is not what fst.sparsity_state returned.")
    if layers.keys() != state.keys():
        missing, extra = sorted(layers.keys() - state.keys()), sorted(state.keys() - layers.keys())
        raise ValueError(
            f"state is of other layers: it lacks {missing}, and {extra} are not converted."
        )
    for name, layer in layers.items():
        if state[name]["strategy"] != str(layer.strategy):
            raise ValueError(
                f"layer {name!r} was saved with strategy {state[name]['strategy']}, but the model "
                f"is converted with {layer.strategy}: resume with the same strategy."
            )
    for name, layer in layers.items():
        layer.step = state[name]["step"]
        mask = state[name]["kept_mask"]
        layer.kept_mask = None if mask is None else mask.to(layer.weight.device)
        layer.forget_pruned()


def seed_random_rules(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Draw random rules from (seed, layer, step) instead of torch's default generator.

    Masks of the weight are then equal on all ranks; those of grad_output and input differ.
    """
    for layer in _layers(model).values():
        layer.seed_random_rules(seed, rank)


def set_grad_scaler(model: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
    """Scale the decay term that is added to gradients as ``scaler`` scales the loss.

    Needed with float16 and a strategy that decays through the gradient (SR-STE, FST).
    """
    for layer in _layers(model).values():
        layer.scale_decay = None if scaler is None else scaler.scale


class Attachment:
    """Handle of `attach`; ``remove()`` undoes it."""

    def __init__(self, hook: Any, layers: list[SparseLayer]) -> None:
        self._hook, self._layers = hook, layers

    def remove(self) -> None:
        """Detach from the optimizer."""
        self._hook.remove()
        for layer in self._layers:
            layer.attached = False


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Attachment:
    """Let strategies do their share of each optimizer step (``decay_mode="decoupled"``).

    Right before the optimizer changes the weights, W ← W − λ(W − S(W)) (FST, Eq. 6).

    Raises:
        ValueError: the model is attached already, or a weight that needs it is not among the
            optimizer's parameters.
    """
    layers = _layers(model)
    decoupled = {
        name: layer
        for name, layer in layers.items()
        if layer.strategy.decay and layer.strategy.decay_mode == "decoupled"
    }
    if any(layer.attached for layer in layers.values()):
        raise ValueError("model is attached to an optimizer already; remove() that handle first.")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, layer in decoupled.items():
        if layer.weight.requires_grad and id(layer.weight) not in owned:
            raise ValueError(f"optimizer does not hold the weight of layer {name!r}.")

    def before_step(*_: Any) -> None:
        seen: set[int] = set()
        for layer in decoupled.values():
            if layer.weight.grad is not None and id(layer.weight) not in seen:
                layer.decay_weight()
                seen.add(id(layer.weight))

    hook = optimizer.register_step_pre_hook(before_step)
    for layer in layers.values():
        layer.attached = True
    return Attachment(hook, list(layers.values()))


def _layers(model: nn.Module) -> dict[str, SparseLayer]:
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer; call fst.convert first.")
    return layers
