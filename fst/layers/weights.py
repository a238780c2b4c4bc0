"""The weights of a converted layer: W, S(W), S(Wᵀ), and their masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fst.backends import registry
from fst.backends.record import Record
from fst.basics.sharding import several_ranks, sharded_as, whole
from fst.layers.remembered import LayerState, TransientState, seeded
from fst.ops.geometry import Geometry
from fst.ops.operators import surroundings
from fst.ops.plan import CallPlan
from fst.ops.prune import PrunedWeight
from fst.rules.strategy import Strategy


class PrunableWeight(nn.Module):
    """A layer's weight, which is pruned anew in each call; nothing of it is remembered.

    Attributes:
        strategy: what is pruned.
        layer_name: the layer's name in the converted model.
        state: what holds from step to step, and is copied and saved.
        transient: what holds within a step, or while the model is attached or frozen.
    """

    weight: Tensor
    bias: Tensor | None
    strategy: Strategy
    layer_name: str
    state: LayerState
    transient: TransientState

    @property
    def conv_groups(self) -> int:
        """Groups of the convolution; 1 for linear layers."""
        return 1

    def _as_conv(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (Cout, Cin/groups, kh, kw)."""
        return tensor

    def _multiplied(self, weight: Tensor) -> Tensor:
        """Return the weight before pruning, computed from the stored one."""
        return weight

    def weight_as_conv(self) -> Tensor:
        """Return the weight to prune and multiply, (Cout, Cin/groups, kh, kw): mostly all of it.

        Where the weight is sharded, all ranks must call this method together.
        """
        return self._as_conv(self._multiplied(whole(self.weight)))

    def gradient_as_conv(self) -> Tensor:
        """The whole gradient of the weight as (Cout, Cin/groups, kh, kw)."""
        assert self.weight.grad is not None
        return self._as_conv(whole(self.weight.grad))

    def shaped_as_weight(self, tensor: Tensor) -> Tensor:
        """A whole tensor with as many elements as the weight, shaped and sharded as the weight."""
        weight = self.weight
        if tensor.device != weight.device:
            tensor = tensor.to(weight.device)
        if tensor.shape != weight.shape:
            tensor = tensor.reshape(weight.shape)
        return sharded_as(tensor, weight)

    @property
    def multiplies_parameter(self) -> bool:
        """True if the GEMMs multiply a Parameter; False where its layer computes the weight."""
        is_parameter = isinstance(self._parameters.get("weight"), nn.Parameter)
        return is_parameter or getattr(self, "_is_replica", False)

    def stored_weight(self) -> nn.Parameter | None:
        """The Parameter that the weight is or is computed from, which an optimizer may hold."""
        weight = self._parameters.get("weight")
        if weight is not None:
            return weight
        return next((p for name, p in self.named_parameters() if name != "bias"), None)

    @property
    def current_strategy(self) -> Strategy:
        """The strategy in the phase at hand: its schedule may change it from phase to phase."""
        strategy, phase = self.strategy, self.state.schedule_state.get("phase")
        if strategy.schedule is None or phase is None:
            return strategy
        return strategy.schedule.strategy_in(strategy, phase)

    def set_phase(self, phase: Any) -> None:
        """Begin a phase of the schedule: the next call prunes as `current_strategy` says."""
        self.state.schedule_state["phase"] = phase
        self.transient.plans.clear()

    def pruned(self, dtype: torch.dtype) -> PrunedWeight:
        """S(W) and S(Wᵀ) in ``dtype`` as the next call has them; no generator moves."""
        weight = self.weight_as_conv()
        plan = self._pruning(weight, dtype)
        if not self.strategy.draws_masks:
            return self._pruned(plan, weight, trains=False)
        device = weight.device
        kind = "cuda" if device.type in ("cpu", "meta") else device.type
        devices = [device] if kind == device.type else []
        with torch.random.fork_rng(devices, device_type=kind):
            return self._pruned(plan, weight, trains=False)

    def _pruning(self, weight: Tensor, dtype: torch.dtype) -> CallPlan:
        """The plan of prunings outside of a call, as the decay needs one in each compiled step."""
        strategy, known = self.current_strategy, self.transient.pruning
        form = (
            *(strategy, dtype, weight.shape, weight.stride(), weight.dtype, weight.device),
            *(registry.demands, surroundings()),
        )
        if known is None or known[0] != form:
            groups = Geometry((1, 1), (0, 0), (1, 1), self.conv_groups)  # pruning reads these alone
            known = form, CallPlan(strategy, groups, dtype, Record(), trains=False)
            if not torch.compiler.is_compiling():
                self.transient.pruning = known
        return known[1]

    def output_mask(self) -> Tensor | None:
        """Mask of the weight in the output GEMM (True = kept), or None where that is dense."""
        mask = self.pruned(self.weight.dtype).mask
        return None if mask is None else mask.reshape(self.weight.shape)

    def effective_weight(self) -> Tensor:
        """S(W), what the output GEMM multiplies with, in the dtype of the weight."""
        weight, rule = self.weight_as_conv().detach(), self.current_strategy.output
        if rule is not None and rule.changes_values:
            return self.pruned(self.weight.dtype).output.reshape(self.weight.shape)
        weight, mask = weight.reshape(self.weight.shape), self.output_mask()
        return weight.clone() if mask is None else weight.masked_fill(~mask, 0)

    def rule_mask(self) -> Tensor:
        """Mask that the output GEMM's rule chooses for the weight as it is, as a convolution's."""
        weight, device = self.weight_as_conv().detach(), self.weight.device
        rule, generator = self.current_strategy.output, self.seeded_generator(device)
        assert rule is not None
        return rule.weight_mask(weight, "output", self.conv_groups, generator)

    def set_mask(self, mask: Tensor) -> None:
        """Prune the weight by ``mask`` (Cout, Cin/groups, kh, kw) until another one is kept."""
        kept = torch.empty_like(self.weight_as_conv(), dtype=torch.bool)
        self.state.kept_mask = kept.copy_(mask)

    def _due_mask(self, weight: Tensor, trains: bool) -> Tensor | None:
        """The mask kept from earlier steps, or None; a training call renews it where it is due."""
        state, interval = self.state, 1
        if self.current_strategy.output is not None:
            interval = self.current_strategy.output.keeps_mask_for
        if interval > 1 and trains and state.mask_step != state.step:
            if state.kept_mask is None or state.step % interval == 0:
                self.set_mask(self.rule_mask())
            state.mask_step = state.step
        if state.kept_mask is not None and state.kept_mask.device != weight.device:
            state.kept_mask = state.kept_mask.to(weight.device)
        return state.kept_mask

    def _pruned(self, plan: CallPlan, weight: Tensor, *, trains: bool) -> PrunedWeight:
        """S(W) and S(Wᵀ), by a kept mask if there is one; inside `fst.frozen`, those of the first
        call with this weight.
        """
        frozen = self.transient.frozen
        key = (plan.dtype, plan.strategy, *identity_of(weight))
        if frozen is not None and key in frozen:
            return frozen[key]
        mask = self._due_mask(weight, trains)
        generator = self.seeded_generator(weight.device) if plan.strategy.draws_masks else None
        pruned = plan.prune(weight.detach(), generator, mask)
        if frozen is not None:
            frozen[key] = pruned
        return pruned

    def seeded_generator(self, device: torch.device, *where: int) -> torch.Generator | None:
        """A generator of (seed, layer, step, where), equal on all ranks.

        Without a seed None in a single process. Of several ranks each may have a seed of its own,
        as in timm's script; their weights are equal, and serve as the seed.
        """
        state, place = self.state, (self.layer_name, self.state.step, *where)
        if state.seed is None and several_ranks():
            values = whole(self.weight).detach()[0].tolist()
            return seeded(values, *place, device=device)
        return None if state.seed is None else seeded(state.seed[0], *place, device=device)


def identity_of(weight: Tensor) -> tuple[Any, ...]:
    """A key that tells a weight and its values from others, as long as the weight lives.

    Tensors that were made in inference mode have no version, and cannot be saved for a backward
    pass.
    """
    inference = torch.is_inference_mode_enabled()
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, inference
