"""PruneTrain: channels that group lasso drives to zero are removed while training goes on.

Paper: Lym et al., "PruneTrain: Fast Neural Network Training by Dynamic Sparse Model
Reconfiguration", SC 2019 (arXiv 1901.09290). Code: bitbucket.org/lph_tools/prunetrain, of which
github.com/VictorSuciu/prunetrain is a copy. As there:

- Penalty λ·Σ‖w‖₂ over the weights of each output and of each input channel, for all channels that
  can be removed (not the image's, not the classes', not in depthwise convolutions), with one λ,
  such that the penalty is the share ``ratio`` of loss plus penalty in the first step.
- Every ``interval`` epochs each channel of which no weight in the layers that produce or read it
  reaches ``threshold`` is removed. Layers joined by additions keep the union of what each needs.
- The optimizer's momentum of what stays is kept.

Differences: at least one channel of a group stays (there, a layer without channels is removed); the
momentum is always kept (there, `cifar.py` builds a new optimizer each epoch). Linear layers take
part with their inputs, whether converted or not; convolutions that are not converted keep theirs.
The loss must be known: the engine reports that of the first step, whose update then goes without
penalty; in your own loop call ``attachment.report_loss(loss)`` before the first step. One process
only: DistributedDataParallel cannot exchange Parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fst.baselines.channel_removal import (
    ChannelGroup,
    Place,
    channel_groups,
    channel_maxima,
    fit_channels,
    remove_channels,
    weights_of,
)
from fst.basics.errors import UsageError
from fst.basics.sharding import refuse_sharded, several_ranks
from fst.basics.values import check_integer, check_number
from fst.rules.schedule import Layers, Run, Schedule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

TINY = 1e-8  # added to squared norms: the gradient of a norm of zero


@dataclass(frozen=True)
class ChannelLasso(Schedule):
    """Group lasso on channels, and removal of those it has driven to zero.

    Attributes:
        ratio: penalty / (loss + penalty) in the first step.
        interval: epochs between two removals.
        threshold: channels without a weight of this magnitude are removed.
    """

    ratio: float = 0.2
    interval: int = 10
    threshold: float = 1e-4
    needs: ClassVar[tuple[str, ...]] = ("steps_per_epoch",)
    replaces_parameters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, 1)
        check_number("ratio", self.ratio, "[0, 1)")
        check_number("threshold", self.threshold, "[0, inf)")

    def fit(
        self,
        model: nn.Module,
        state_dict: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[str]:
        return fit_channels(model, state_dict, optimizer)

    def attached(self, layers: Layers, run: Run) -> None:
        refuse_sharded(
            run.model, "strategy 'prunetrain'", "it replaces Parameters; train in one process"
        )
        if several_ranks() or isinstance(run.model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "strategy 'prunetrain' replaces Parameters, which DistributedDataParallel cannot "
                "follow: train in one process."
            )

        def see_input(model: nn.Module, inputs: tuple[Any, ...], options: Any) -> None:
            if len(inputs) != 1 or options or not isinstance(inputs[0], Tensor):
                raise ValueError(
                    "strategy 'prunetrain' follows channels through models that take one tensor; "
                    f"{type(model).__name__} is called with {len(inputs)} arguments and the "
                    f"options {sorted(options)}."
                )
            run.notes["size"] = inputs[0].shape[1:]
            hook.remove()

        hook = run.model.register_forward_pre_hook(see_input, with_kwargs=True)
        run.hooks.append(hook)
        run.notes["producers"] = set(layers)

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        state = layers[0].state.schedule_state
        sides = list(self._penalised(run))
        if "lasso" not in state:
            if run.loss is None and step > 1:
                raise UsageError(
                    "strategy 'prunetrain' sets its penalty by the first loss, and knows none: "
                    "call report_loss(loss) of what fst.attach returned before optimizer.step()."
                )
            if run.loss is None:
                return
            penalty = sum((norms * mask).sum() for _, norms, mask in sides)
            state["lasso"] = self.ratio / (1 - self.ratio) * run.loss.float() / penalty
        for weight, norms, mask in sides:
            if weight.grad is not None:
                run.check_gradient(weight)
                weight.grad.add_(weight * (mask / norms) * state["lasso"].to(weight.device))

    def _penalised(self, run: Run) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weight, norms of its slices along one axis, and which of them count; to broadcast."""
        found: dict[Place, tuple[Tensor, Tensor]] = {}
        for group in _removable(run):
            for place, weight, channels in weights_of(run.model, group):
                _, mask = found.setdefault(place, (weight, weight.new_zeros(len(channels))))
                mask[channels.to(mask.device) >= 0] = 1
        for (_, axis), (weight, mask) in found.items():
            others = [d for d in range(weight.dim()) if d != axis]
            norms = weight.detach().square().sum(others, keepdim=True).add(TINY).sqrt()
            yield weight, norms, mask.view(norms.shape)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        due = int(step / run.steps_per_epoch + 1e-6) // self.interval
        state = layers[0].state.schedule_state
        if state.get("removals", 0) >= due:
            return
        state["removals"] = due
        removed = []
        for group in _removable(run):
            maxima = channel_maxima(run.model, group)
            mask = maxima < self.threshold
            mask[maxima.argmax()] = False
            removed.append((group, mask))
        if any(bool(mask.any()) for _, mask in removed):
            remove_channels(run.model, removed, run.optimizer)
            del run.notes["groups"]  # the model is traced anew


def _removable(run: Run) -> list[ChannelGroup]:
    """The groups without an obstacle, traced when they are first asked for."""
    if "groups" not in run.notes:
        kind = type(run.model).__name__
        if "size" not in run.notes:
            raise UsageError(
                "strategy 'prunetrain' follows channels through the model that fst.attach was "
                f"given, and this {kind} has not been called."
            )
        example = next(run.model.parameters()).new_zeros(2, *run.notes["size"])
        groups = channel_groups(run.model, example, run.notes["producers"])
        free = run.notes["groups"] = [group for group in groups if not group.obstacle]
        if not free:
            obstacles = "; ".join(dict.fromkeys(group.obstacle for group in groups))
            raise ValueError(
                f"strategy 'prunetrain' finds no channel that it could remove from {kind}: "
                f"{obstacles}."
            )
    found: list[ChannelGroup] = run.notes["groups"]
    return found


@register_strategy("prunetrain")
def prunetrain(ratio: float = 0.2, interval: int = 10, threshold: float = 1e-4) -> Strategy:
    """Dense GEMMs of a model that loses channels every ``interval`` epochs."""
    return Strategy("prunetrain", schedule=ChannelLasso(ratio, interval, threshold))
