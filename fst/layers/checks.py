"""What a layer needs before it trains: exceptions that say what to call, or what to leave."""

from __future__ import annotations

from fst.layers.remembered import LayerState, RunState
from fst.rules.strategy import Strategy

MOST_CALLS = 1000  # of a layer in one step


def started(name: str, strategy: Strategy, state: LayerState, run: RunState) -> None:
    """Start a schedule that works at steps.

    Raises:
        RuntimeError: the model is not attached to an optimizer.
    """
    if strategy.schedule is None or not strategy.schedule.acts_at_steps:
        return
    if run.start is None:
        raise RuntimeError(
            f"layer {name!r}: strategy {strategy.name!r} works at the optimizer's steps; "
            "call fst.attach(model, optimizer) before training."
        )
    if "started" not in state.schedule_state:
        run.start()


def ended(name: str, strategy: Strategy, run: RunState) -> None:
    """Raise RuntimeError where gradients are remembered and no step ever ends."""
    if strategy.has_memory and run.calls >= MOST_CALLS:
        raise RuntimeError(
            f"layer {name!r} was called {run.calls} times in training without a step of an "
            f"optimizer that holds its weight; {strategy.name!r} tells steps apart by that."
        )


def traceable(name: str, strategy: Strategy) -> None:
    """Raise RuntimeError where training changes state that torch.compile cannot trace."""
    rule, what, advice = strategy.output, "", ""
    if strategy.schedule is not None and strategy.schedule.acts_at_steps:
        what = f"masks that {strategy.name!r} changes between steps are"
    elif strategy.has_memory:
        what = "the previous step's gradients are"
    elif strategy.keeps_masks:
        what = f"a mask kept for interval={rule.keeps_mask_for} steps is"
        advice = " or use interval=1"
    elif strategy.decay and rule.is_random:
        what = "the random mask that the decay needs at the optimizer's step is"
    if what:
        raise RuntimeError(
            f"layer {name!r}: {what} state that torch.compile cannot trace; "
            f"train uncompiled{advice}."
        )
