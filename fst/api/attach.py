"""The strategies' share of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fst.basics.errors import UsageError
from fst.basics.sharding import ORDER, is_managed, is_sharded, reshard
from fst.layers import checks
from fst.layers.modules import SparseLayer, converted_layers
from fst.layers.step import is_skipped, steps_under_way, with_gradients
from fst.rules.schedule import Run, Schedule
from fst.rules.strategy import Strategy


class Attachment:
    """Handle of `attach`; ``remove()`` undoes it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, layers: list[SparseLayer], run: Run
    ) -> None:
        self._run = run
        self._by_strategy: dict[Strategy, list[SparseLayer]] = {}
        for layer in layers:
            self._by_strategy.setdefault(layer.strategy, []).append(layer)
        for schedule, scheduled in self._scheduled():
            schedule.attached(scheduled, run)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._is_sharded = any(is_sharded(layer.weight) for layer in layers)
        if self._is_sharded:
            # ahead of the hook of fully_shard, which gathers
            self._hooks.append(run.model.register_forward_pre_hook(self._before_call, prepend=True))
        for layer in layers:
            layer.transient.start = self._start

    def report_loss(self, loss: torch.Tensor) -> None:
        """Tell schedules the loss of a step; `prunetrain` weighs its penalty by the first one.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss={loss!r} must be the tensor whose backward() is called.")
        self._run.loss = loss.detach()

    def remove(self) -> None:
        """Detach from the optimizer."""
        for hook in (*self._hooks, *self._run.hooks):
            hook.remove()
        for layer in self._layers():
            layer.transient.start = None

    def _scheduled(self) -> Iterator[tuple[Schedule, list[SparseLayer]]]:
        """Each schedule with its layers, but for those that were folded since."""
        for strategy, layers in self._by_strategy.items():
            left = [layer for layer in layers if isinstance(layer, SparseLayer)]
            if left and strategy.schedule is not None:
                yield strategy.schedule, left

    def _layers(self) -> list[SparseLayer]:
        return [layer for _, layers in self._scheduled() for layer in layers]

    def _before_call(self, model: nn.Module, _: Any) -> None:
        """Start schedules while weights are the optimizer's."""
        if not model.training or not torch.is_grad_enabled():
            return
        layers = self._layers()
        if _new(layers):
            for layer in layers:
                checks.refuse_flat_weight(layer, layer.layer_name)
            reshard(model)
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        for schedule, layers in self._scheduled():
            new = _new(layers)
            if self._is_sharded and not all(is_sharded(layer.weight) for layer in new):
                raise UsageError(
                    f"strategy {new[0].strategy.name!r} starts before FSDP gathers weights: give "
                    "fst.attach the model that is called in training and was given to fully_shard."
                )
            if new:
                schedule.start(new, self._run)
            for layer in new:
                layer.state.schedule_state["started"] = True

    @torch.no_grad()
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if steps_under_way(optimizer) > 1:
            return None
        for layer in self._layers():
            layer.transient.acted = True

        def act(first: bool) -> None:
            layers = self._layers()
            if is_skipped(optimizer, layers):
                return
            for layer in _new(layers):
                if layer.weight.grad is not None:
                    raise UsageError(
                        f"layer {layer.layer_name!r} has a gradient, and was never called in "
                        f"training mode: strategy {layer.strategy.name!r} would not act. Call "
                        "model.train(), and then eval() on batch norms alone if they shall stay."
                    )
            for schedule, layers in self._trained():
                if not first:
                    raise UsageError(
                        f"{type(optimizer).__name__}.step calls its closure several times: "
                        f"strategy {layers[0].strategy.name!r} needs one that calls it once."
                    )
                schedule.before_update(layers, self._run, _step(layers))

        return with_gradients(args, kwargs, act)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if steps_under_way(optimizer) > 1:
            return
        self._run.show_gradients()
        if is_skipped(optimizer, self._layers()):
            return
        for schedule, layers in self._trained():
            schedule.after_update(layers, self._run, _step(layers))

    def _trained(self) -> Iterator[tuple[Schedule, list[SparseLayer]]]:
        """The schedules whose layers have had a training step."""
        for schedule, layers in self._scheduled():
            if not _new(layers):
                yield schedule, layers


def _new(layers: list[SparseLayer]) -> list[SparseLayer]:
    return [layer for layer in layers if "started" not in layer.state.schedule_state]


def _step(layers: list[SparseLayer]) -> int:
    """The step under way, which the layers count when it is over."""
    return max(layer.state.step for layer in layers) + 1


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int | None = None,
    steps_per_epoch: float | None = None,
) -> Attachment:
    """Let strategies do their share of each optimizer step.

    Around the step strategies with a `Schedule` choose masks, and zero gradients, weights and
    momentum. Other strategies need no attachment; SR-STE's decay acts without one.

    Args:
        model: converted; it may be trained on any loss, in any loop.
        optimizer: holds the weights of the layers with a schedule. Attach each of several
            optimizers to the part of the model that it trains.
        total_steps: optimizer steps of the whole training, for schedules that end with it.
        steps_per_epoch: optimizer steps of one pass over the data, for schedules that act after
            each epoch.

    Raises:
        ValueError: the model is attached already; or a schedule needs ``total_steps`` or
            ``steps_per_epoch``; or a weight of a layer with a schedule is not among the
            optimizer's parameters, is computed from others, is shared by two layers, or is
            gathered or flattened (FSDP1) by FSDP.
        TypeError: ``model`` is no module, or ``optimizer`` none of torch's.
    """
    layers = converted_layers(model)
    # accelerate's wrapper says that it is an Optimizer, and has no hooks
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer: of a "
            "wrapper, the one inside."
        )
    if any(layer.transient.start is not None for layer in layers.values()):
        raise ValueError("model is attached to an optimizer already; remove() that handle first.")
    run = Run(optimizer, model, total_steps, steps_per_epoch)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    owners: dict[int, str] = {}
    scheduled: list[SparseLayer] = []
    for name, layer in layers.items():
        strategy = layer.strategy
        if is_managed(layer):
            checks.refuse_flat_weight(layer, name)
            if not is_sharded(layer.weight):
                raise ValueError(
                    f"the weight of layer {name!r} is gathered by FSDP: call reshard() of its "
                    "module before the optimizer is built."
                )
        schedule = strategy.schedule
        if schedule is None:
            continue
        if layer._parameters.get("weight") is None:
            raise ValueError(
                f"the weight of layer {name!r} is computed from other parameters; "
                f"{strategy.name!r} works on stored ones: exclude the layer in fst.convert."
            )
        if layer.weight.requires_grad and id(layer.weight) not in owned:
            order = f": {ORDER}" if is_sharded(layer.weight) else ""
            raise ValueError(f"optimizer does not hold the weight of layer {name!r}{order}.")
        for argument in schedule.needs:
            if getattr(run, argument) is None:
                raise ValueError(
                    f"{argument}=None: strategy {strategy.name!r} plans by it; "
                    f"call fst.attach(model, optimizer, {argument}=...)."
                )
        other = owners.setdefault(id(layer.weight), name)
        if other != name:
            raise ValueError(
                f"layers {other!r} and {name!r} share a weight; {strategy.name!r} keeps one mask "
                "for each layer: exclude them in fst.convert."
            )
        scheduled.append(layer)
    return Attachment(optimizer, scheduled, run)
