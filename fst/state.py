"""What a checkpoint needs beside the state_dict, and the seeds of random rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fst.layers.modules import converted_layers, sparse_layers
from fst.ops.reuse import ReuseMemory


def sparsity_state(model: nn.Module) -> dict[str, Any]:
    """What all converted layers remember, as plain data for a checkpoint.

    The state_dict stays that of the dense model; this belongs beside it.
    """
    return {
        name: {
            "strategy": str(layer.strategy),
            "step": layer.step,
            "kept_mask": None if layer.kept_mask is None else layer.kept_mask.cpu(),
            "schedule_state": _on_device(layer.schedule_state, torch.device("cpu")),
            "memories": {call: memory.state() for call, memory in layer.memories.items()},
        }
        for name, layer in sparse_layers(model).items()
    }


def load_sparsity_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `sparsity_state` returned.

    Raises:
        ValueError: the state belongs to other layers or to another strategy.
    """
    layers = converted_layers(model)
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
        device = layer.weight.device
        layer.kept_mask = None if mask is None else mask.to(device)
        layer.schedule_state = _on_device(state[name].get("schedule_state", {}), device)
        layer.memories = {
            call: ReuseMemory.restored(memory, layer.weight.device)
            for call, memory in state[name].get("memories", {}).items()
        }
        layer.forget_pruned()


def seed_random_rules(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Draw random rules from (seed, layer, step) instead of torch's default generator.

    Masks of the weight are then equal on all ranks; those of grad_output and input differ.
    """
    for layer in converted_layers(model).values():
        layer.seed_random_rules(seed, rank)


def _on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
