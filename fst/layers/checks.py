"""Checks before a layer trains: what to call, or what to leave."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fst.basics.errors import UsageError
from fst.basics.sharding import is_flat, is_sharded
from fst.layers.remembered import TransientState
from fst.rules.strategy import Strategy

MOST_CALLS = 1000  # of a layer in one step


def require_attachment(name: str, strategy: Strategy, transient: TransientState) -> None:
    """Raise RuntimeError where a schedule works at steps and no optimizer is known."""
    if strategy.schedule is not None and transient.start is None:
        raise UsageError(
            f"layer {name!r}: strategy {strategy.name!r} works at the optimizer's steps; "
            "call fst.attach(model, optimizer) before training."
        )


def refuse_sharded_weight(name: str, weight: Tensor) -> None:
    """Raise RuntimeError where a call finds a part of the weight."""
    if is_sharded(weight):
        raise UsageError(
            f"layer {name!r}: its weight is a DTensor in the forward pass. Tensor parallelism is "
            "not supported; fully_shard is, where the layer is called by the forward of a module "
            "that was given to it."
        )


def refuse_flat_weight(layer: nn.Module, name: str) -> None:
    """Raise ValueError where FSDP1 keeps the weight."""
    if is_flat(layer):
        raise ValueError(
            f"layer {name!r}: FSDP1 (FullyShardedDataParallel) is not supported: it flattens "
            "weights, and masks are chosen from whole ones; use fully_shard of "
            "torch.distributed.fsdp (FSDP2), or DistributedDataParallel."
        )


def refuse_endless_step(name: str, strategy: Strategy, transient: TransientState) -> None:
    """Raise RuntimeError where no step ever ends, of a strategy that remembers gradients."""
    if transient.calls >= MOST_CALLS:
        raise UsageError(
            f"layer {name!r} was called {transient.calls} times in training without a step of an "
            f"optimizer that holds its weight; {strategy.name!r} tells steps apart by that."
        )


def refuse_untraceable(name: str, strategy: Strategy) -> None:
    """Raise RuntimeError where training changes state that torch.compile cannot trace."""
    what, advice = _changing_state(strategy)
    if what:
        message = (
            f"layer {name!r}: {what} state that torch.compile cannot trace; "
            f"train uncompiled{advice}."
        )
        torch._dynamo.graph_break(msg=message)  # so that uncompiled code raises the error below
        raise UsageError(message)


def refuse_capture(name: str, strategy: Strategy, *, is_seeded: bool) -> None:
    """Raise RuntimeError where a CUDA graph would repeat what training changes in each step."""
    what, advice = _changing_state(strategy)
    if strategy.is_random and is_seeded:
        what, advice = "what fst.seed_random_rules draws at each step is", " or without the seed"
    if what:
        raise UsageError(
            f"layer {name!r}: {what} state that a CUDA graph cannot repeat; train without "
            f"one{advice}."
        )


def _changing_state(strategy: Strategy) -> tuple[str, str]:
    """Return what the host changes between steps, with its verb, and how to do without it."""
    rule = strategy.output
    if strategy.schedule is not None:
        return f"masks that {strategy.name!r} changes between steps are", ""
    if strategy.has_memory:
        return "the previous step's gradients are", ""
    if rule is not None and rule.keeps_mask_for > 1:
        return f"a mask kept for interval={rule.keeps_mask_for} steps is", " or use interval=1"
    if strategy.decay and rule is not None and rule.is_random:
        return "the random mask that the decay needs at the optimizer's step is", ""
    if getattr(strategy.grad_weight, "phase", None) == "random":
        advice = " or use a number, such as phase=0"
        return "the phase='random' that is drawn at each step is", advice
    return "", ""
