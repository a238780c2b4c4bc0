"""The actions of a strategy around optimizer steps: masks that are kept and refreshed.

A `Schedule` holds options alone. Whatever it remembers lies in the layers' state, and so in
`fst.sparsity_state`. `fst.attach` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fst.basics.errors import UsageError
from fst.basics.values import check_number

DENSE: Mapping[str, Any] = {"dense": True}  # a phase in which nothing is pruned


class Remembered(Protocol):
    """The part of a layer's state that schedules read and write.

    Attributes:
        kept_mask: mask of the weight (Cout, Cin/groups, kh, kw), see `PrunedLayer.set_mask`.
        schedule_state: whatever a schedule remembers of the layer, by name.
    """

    kept_mask: Tensor | None
    schedule_state: dict[str, Any]


class PrunedLayer(Protocol):
    """The part of a converted layer that a schedule may touch; its rules are in ``strategy``."""

    weight: Tensor
    strategy: Any  # a Strategy; its module imports this one

    @property
    def state(self) -> Remembered:
        """The state that holds from step to step."""

    @property
    def conv_groups(self) -> int:
        """Groups of the convolution; 1 for linear layers."""

    def weight_as_conv(self) -> Tensor:
        """The whole weight as (Cout, Cin/groups, kh, kw)."""

    def gradient_as_conv(self) -> Tensor:
        """The whole gradient of the weight as (Cout, Cin/groups, kh, kw)."""

    def shaped_as_weight(self, tensor: Tensor) -> Tensor:
        """A whole tensor of as many elements, shaped and sharded as the weight and its gradient."""

    def rule_mask(self) -> Tensor:
        """Mask that the output GEMM's rule chooses for the weight as it is."""

    def set_phase(self, phase: Any) -> None:
        """Let `Schedule.strategy_in` of ``phase`` prune from the next call on; plain data."""

    def set_mask(self, mask: Tensor) -> None:
        """Prune the weight by ``mask`` until another one is kept."""

    def seeded_generator(self, device: torch.device, *where: int) -> torch.Generator | None:
        """A generator of (seed, layer, step, where), equal on all ranks."""


Layers: TypeAlias = Sequence[PrunedLayer]


def check_descends(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """Raise RuntimeError if the optimizer maximizes.

    A decay that is added to the gradient would then let the pruned weights grow.
    """
    for group in optimizer.param_groups:
        if group.get("maximize") and any(parameter is weight for parameter in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__}: maximize=True turns round what strategies add to "
                "gradients; use maximize=False and the negated loss."
            )


class Run:
    """A training run, as a schedule sees it.

    Args:
        optimizer: holds the weights of the layers.
        model: the converted model.
        total_steps: optimizer steps of the whole training, or None if unknown.
        steps_per_epoch: those of one epoch, or None; a fraction where steps span epochs.

    Attributes:
        loss: what `Attachment.report_loss` was told last.
        hooks: handles of what schedules registered; removed with the attachment.
        notes: whatever a schedule remembers of the run, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        total_steps: int | None = None,
        steps_per_epoch: float | None = None,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("steps_per_epoch", steps_per_epoch)):
            if value is not None:
                check_number(name, value, "(0, inf)")
        self.optimizer = optimizer
        self.model = model
        # Any: `attach` refuses None where a schedule needs the number.
        self.total_steps: Any = total_steps
        self.steps_per_epoch: Any = steps_per_epoch
        self.loss: Tensor | None = None
        self.hooks: list[RemovableHandle] = []
        self.notes: dict[str, Any] = {}
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

    def check_gradient(self, weight: Tensor) -> None:
        """Raise RuntimeError where a pull added to the weight's gradient would act otherwise.

        Gradients may still have the scale of a GradScaler's loss, or be climbed.
        """
        check_descends(self.optimizer, weight)
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise UsageError(
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
    """Acts around optimizer steps on the layers that share a strategy.

    `step` counts the steps of the optimizer, so it is 1 in the first `before_update`. It stands
    still where a GradScaler skips a step.

    Attributes:
        needs: the arguments of `fst.attach` that the schedule requires.
        needs_trained_model: whether it makes sense only for a model that has been trained dense.
        replaces_parameters: whether Parameters get new, smaller ones in training.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    needs_trained_model: ClassVar[bool] = False
    replaces_parameters: ClassVar[bool] = False

    def strategy_in(self, strategy: Any, phase: Any) -> Any:
        """Return the strategy of ``phase``, which `PrunedLayer.set_phase` left in the state.

        In the phase `DENSE` it prunes nothing and has no decay.
        """
        if phase != DENSE:
            return strategy
        return replace(strategy, output=None, grad_input=None, grad_weight=None, decay=0.0)

    def remembered(self, phase: Any) -> tuple[str, ...]:
        """Keys that the state of a started layer has in ``phase``: of `Remembered.schedule_state`,
        or "kept_mask". States that lack one are refused.
        """
        return ()

    def fit(
        self,
        model: nn.Module,
        state_dict: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[str]:
        """Give ``model`` the shapes of ``state_dict``, which is loaded next; in place.

        Returns:
            Names of the layers that changed: none, unless the schedule replaces Parameters.
        """
        return []

    def attached(self, layers: Layers, run: Run) -> None:
        """At the end of `fst.attach`: refuse now what cannot work, register hooks."""

    def start(self, layers: Layers, run: Run) -> None:
        """Before the first training step: the first masks."""

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        """Right before the optimizer's step: gradients are there, not scaled."""

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        """Right after the optimizer's step: the weights are new."""


def _kept_mask(layer: PrunedLayer) -> Tensor:
    mask = layer.state.kept_mask
    assert mask is not None
    return layer.shaped_as_weight(mask)


def mask_gradients(layers: Layers) -> None:
    """Zero the gradients of pruned weights, in place."""
    for layer in layers:
        if layer.weight.grad is not None:
            layer.weight.grad.mul_(_kept_mask(layer))


def hold_at_zero(layers: Layers, run: Run) -> None:
    """Zero pruned weights and the optimizer's tensors of them, in place."""
    for layer in layers:
        mask = _kept_mask(layer)
        for tensor in (layer.weight, *run.state_of(layer.weight)):
            tensor.mul_(mask)


class HeldMasks(Schedule):
    """Pruned weights, their gradients and their momentum are exactly zero."""

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return () if phase == DENSE else ("kept_mask",)

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        mask_gradients(layers)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        hold_at_zero(layers, run)
