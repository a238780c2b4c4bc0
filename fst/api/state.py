"""The state that a checkpoint needs beside the state_dict, and the seeds of random rules."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from fst.layers.modules import SparseLayer, converted_layers, sparse_layers


def sparsity_state(model: nn.Module) -> dict[str, Any]:
    """The state of all converted layers: name of each layer -> dict of plain data and tensors.

    Save it in the checkpoint beside the state_dict, which stays that of the dense model. It is
    empty where no layer is converted.

    Raises:
        TypeError: ``model`` is no module.
    """
    return {
        name: {
            "strategy": str(layer.strategy),
            **layer.state.saved(),
            "calls": layer.transient.calls,
        }
        for name, layer in sparse_layers(model).items()
    }


def load_sparsity_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `sparsity_state` returned. Call it between two steps, also within a run.

    Random rules draw from the seed that the state was saved with, if `seed_random_rules` had set
    one, and on from its step.

    Warns where backends were chosen on another machine: they are chosen anew.

    Raises:
        ValueError: the state belongs to other layers or to another strategy, or a value in it is
            impossible; nothing is restored then.
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
                f"is converted with {layer.strategy}: use the strategy that it was saved with."
            )
        _check_entry(name, layer, state[name])
        _check_schedule(name, layer, state[name])
    others = set()
    for name, layer in layers.items():
        others.add(layer.state.restore(state[name], layer.weight.device))
        layer.transient.forget_calls()
        layer.transient.plans.clear()
        layer.transient.calls = state[name].get("calls", 0)
        layer.transient.has_loaded_state = True
    if others := others - {""}:
        warnings.warn(
            "backends were chosen on another machine or with other settings "
            f"({', '.join(sorted(others))}) and are chosen anew: results may differ in rounding.",
            stacklevel=2,
        )


def _check_entry(name: str, layer: SparseLayer, entry: Mapping[str, Any]) -> None:
    step, mask, size = entry["step"], entry["kept_mask"], layer.weight.numel()
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.numel() == size
    fits = {
        "step": (_is_count(step), "0, 1, 2, ..."),
        "calls": (_is_count(entry.get("calls", 0)), "0, 1, 2, ..."),
        "seed": (type(entry.get("seed")) in (int, type(None)), "None or an integer"),
        "kept_mask": (mask is None or is_mask, f"None or a mask of the weight's {size} elements"),
    }
    for field in ("schedule_state", "memories"):
        fits[field] = (isinstance(entry.get(field, {}), Mapping), "a dictionary")
    for field, (is_valid, allowed) in fits.items():
        if not is_valid:
            found = entry[field]
            if isinstance(found, Tensor):
                found = f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(
                f"layer {name!r}: {field}={found!r:.200} in the state must be {allowed}."
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_schedule(name: str, layer: SparseLayer, entry: Mapping[str, Any]) -> None:
    """Refuse what the schedule of a started training could not go on with."""
    schedule, state = layer.strategy.schedule, entry.get("schedule_state", {})
    if schedule is None or "started" not in state:
        return
    phase = state.get("phase")
    known = state.keys() | ({"kept_mask"} if entry["kept_mask"] is not None else set())
    for key in schedule.remembered(phase):
        if key not in known:
            raise ValueError(
                f"layer {name!r}: the state lacks {key!r}, which strategy {layer.strategy.name!r} "
                "remembers from its first step on."
            )
    if phase is None:
        return
    try:
        schedule.strategy_in(layer.strategy, phase)
    except Exception as error:  # whatever rules say of options that are none
        raise ValueError(
            f"layer {name!r}: phase={phase!r:.200} in the state is none of strategy "
            f"{layer.strategy.name!r}: {type(error).__name__}: {error}."
        ) from error


def seed_random_rules(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Draw random rules from (seed, layer, step) instead of torch's default generator.

    Masks of the weight are equal on all ranks; masks of grad_output and input differ. Without this
    call several ranks draw a layer's masks from its weights, and so alike too. `sparsity_state`
    holds the seed, not the rank: a resumed process keeps its own.

    Raises:
        TypeError: ``seed`` or ``rank`` is no integer.
        ValueError: no layer of ``model`` is converted.
    """
    for name, value in (("seed", seed), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}={value!r} must be an integer.")
    seed, rank = operator.index(seed), operator.index(rank)
    for layer in converted_layers(model).values():
        layer.state.seed = (seed, rank)
