"""What a strategy does to its layers around optimizer steps: masks that are kept and refreshed.

A `Schedule` holds options alone. Whatever it remembers lies in the layers (`SparseLayer.kept_mask`
and `schedule_state`), and so in `fst.sparsity_state`. `fst.attach` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from fst.layers.modules import SparseLayer
    from fst.strategies.prunetrain import TracedChannels

Layers: TypeAlias = "Sequence[SparseLayer]"


class Run:
    """A training run, as a schedule sees it.

    Args:
        optimizer: holds the weights of the layers.
        total_steps: optimizer steps of the whole training, or None if nobody said.
        steps_per_epoch: likewise of one epoch; a fraction where steps span epochs.
        model: the converted model.

    Attributes:
        loss: what `Attachment.report_loss` was told last.
        hooks: handles of what schedules registered; removed with the attachment.
        channels: what `fst.strategies.prunetrain` has traced.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int | None = None,
        steps_per_epoch: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("steps_per_epoch", steps_per_epoch)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise ValueError(f"{name}={value!r} must be a number > 0, or None.")
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.model = model
        self.loss: Tensor | None = None
        self.hooks: list[RemovableHandle] = []
        self.channels: TracedChannels | None = None
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    def skip_update(self) -> None:
        """Let the optimizer's step at hand change no parameter: it sees no gradients."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def show_gradients(self) -> None:
        """After the optimizer's step: give the gradients back that `skip_update` hid."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def check_unscaled(self) -> None:
        """Raise RuntimeError if gradients still have the scale of a GradScaler's loss."""
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} unscales gradients itself, too late for "
                "what is added to them: call scaler.unscale_(optimizer) before scaler.step."
            )

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """The optimizer's tensors of the parameter's shape: momentum and the like."""
        state = self.optimizer.state.get(parameter, {})
        return [
            value
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]


@dataclass(frozen=True)
class Schedule:
    """What happens around optimizer steps to the layers that share a strategy.

    `step` counts the training steps whose gradient has arrived, so it is 1 in the first
    `before_update`. It goes on where a GradScaler skips an update.

    Attributes:
        needs: the arguments of `fst.attach` that it cannot do without.
        needs_trained_model: whether it makes sense only for a model that has been trained dense.
        removes_channels: whether the model gets smaller; Parameters are then replaced.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    needs_trained_model: ClassVar[bool] = False
    removes_channels: ClassVar[bool] = False

    def attached(self, layers: Layers, run: Run) -> None:
        """At the end of `fst.attach`: refuse now what cannot work, register hooks."""

    def start(self, layers: Layers, run: Run) -> None:
        """Before the first training step: the first masks."""

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        """Right before the optimizer's step: gradients are there, not scaled."""

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        """Right after the optimizer's step: the weights are new."""


def mask_gradients(layers: Layers) -> None:
    """Zero the gradients of pruned weights, in place."""
    for layer in layers:
        if layer.weight.grad is not None:
            layer.weight.grad.mul_(layer.mask_of_weight())


def hold_at_zero(layers: Layers, run: Run) -> None:
    """Zero pruned weights and the optimizer's tensors of them, in place."""
    for layer in layers:
        mask = layer.mask_of_weight()
        for tensor in (layer.weight, *run.state_of(layer.weight)):
            tensor.mul_(mask)


class HeldMasks(Schedule):
    """Pruned weights, their gradients and their momentum are exactly zero."""

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        mask_gradients(layers)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        hold_at_zero(layers, run)
