"""Layers whose weight, Parameter object and state_dict stay those of the dense layer.

`fst.convert` turns a layer into one of these by changing its class, so that optimizers, hooks and
references held elsewhere stay valid.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.backends import dispatch
from fst.basics.errors import UsageError
from fst.basics.sharding import is_managed, laid_out_as, whole
from fst.basics.values import check_module
from fst.layers import checks
from fst.layers.remembered import LayerState, RunState
from fst.ops.arguments import IntPair, check_tensors, compute_dtype, padded_geometry
from fst.ops.conv import Call, convolve_pruned, exact_key, linear_as_conv
from fst.ops.prune import PrunedWeight, prune_weight
from fst.rules.strategy import Strategy

Geometry = tuple[IntPair, IntPair | str, IntPair]
_LIVING: weakref.WeakKeyDictionary[SparseLayer, None] = weakref.WeakKeyDictionary()


class SparseLayer(nn.Module):
    """What converted layers share: they prune in each call, and remember nothing of the weight.

    Attributes:
        strategy: what is pruned.
        layer_name: the layer's name in the converted model.
        state: what holds from step to step, and is copied and saved.
        run: what holds within a step, or while the model is attached or frozen.
    """

    dense_class: ClassVar[type[nn.Module]]
    weight: Tensor
    bias: Tensor | None
    strategy: Strategy
    layer_name: str
    state: LayerState
    run: RunState

    @classmethod
    def sparsify(cls, layer: nn.Module, strategy: Strategy, name: str) -> SparseLayer:
        """Turn a layer of `dense_class` into this class; parameters, hooks and all else stay."""
        layer.__class__ = cls
        layer.__dict__.update(
            strategy=strategy, layer_name=name, state=LayerState(), run=RunState()
        )
        _LIVING[layer] = None
        return layer

    @classmethod
    def obstacle(cls, strategy: Strategy) -> str | None:
        """Why layers of this class cannot follow ``strategy``; None if they can."""
        return None

    @property
    def folded_class(self) -> type[nn.Module]:
        """What multiplies with its weight as it is: the class that `densify` makes of the layer."""
        return self.dense_class

    def densify(self, weight: Tensor) -> None:
        """Become `folded_class`, with the values of ``weight``."""
        with torch.no_grad():
            self.weight.copy_(weight)
        for name in ("strategy", "layer_name", "state", "run"):
            delattr(self, name)
        _LIVING.pop(self, None)
        self.__class__ = self.folded_class

    @property
    def conv_groups(self) -> int:
        """Groups of the convolution; 1 for linear layers."""
        return 1

    def _as_conv(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (Cout, Cin/groups, kh, kw)."""
        return tensor

    def _multiplied(self, weight: Tensor) -> Tensor:
        """What the GEMMs multiply before pruning, from the stored weight."""
        return weight

    def weight_as_conv(self) -> Tensor:
        """What is pruned and then multiplied, (Cout, Cin/groups, kh, kw): mostly the whole weight.

        All ranks must ask for that of a sharded one.
        """
        return self._as_conv(self._multiplied(whole(self.weight)))

    def gradient_as_conv(self) -> Tensor:
        """The whole gradient of the weight, likewise."""
        return self._as_conv(whole(self.weight.grad))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A whole tensor with as many elements as the weight, shaped and sharded as the weight."""
        weight = self.weight
        if tensor.device != weight.device:
            tensor = tensor.to(weight.device)
        if tensor.shape != weight.shape:
            tensor = tensor.reshape(weight.shape)
        return laid_out_as(tensor, weight)

    @property
    def multiplies_parameter(self) -> bool:
        """Whether that is a Parameter, which an optimizer steps, and nothing computed from one."""
        parameter, replicated = self._parameters.get("weight"), getattr(self, "_is_replica", False)
        return isinstance(parameter, nn.Parameter) or replicated

    def stored_weight(self) -> nn.Parameter | None:
        """The Parameter that the weight is or is computed from, which an optimizer may hold."""
        weight = self._parameters.get("weight")
        if weight is not None:
            return weight
        return next((p for name, p in self.named_parameters() if name != "bias"), None)

    @property
    def acting(self) -> Strategy:
        """What prunes now: the strategy, or what its schedule makes of it in the phase at hand."""
        strategy, phase = self.strategy, self.state.schedule_state.get("phase")
        if strategy.schedule is None or phase is None:
            return strategy
        return strategy.schedule.acting(strategy, phase)

    def enter(self, phase: Any) -> None:
        """Let the schedule's `acting` of ``phase`` prune from the next call on."""
        self.state.schedule_state["phase"] = phase

    def mask(self) -> Tensor | None:
        """Mask of the weight (Cout, Cin/groups, kh, kw) as the next call has it; None: dense."""
        return self.pruned(self.weight.dtype).mask

    def pruned(self, dtype: torch.dtype) -> PrunedWeight:
        """S(W) and S(Wᵀ) in ``dtype`` as the next call has them; no generator moves."""
        device = self.weight.device
        kind = "cuda" if device.type in ("cpu", "meta") else device.type
        devices = [device] if kind == device.type else []
        with torch.random.fork_rng(devices, self.strategy.draws_masks, device_type=kind):
            return self._prune(self.weight_as_conv(), dtype, trains=False)

    def output_mask(self) -> Tensor | None:
        """Mask of the weight in the output GEMM (True = kept), or None where that is dense."""
        mask = self.mask()
        return None if mask is None else mask.reshape(self.weight.shape)

    def effective_weight(self) -> Tensor:
        """S(W), what the output GEMM multiplies with, in the dtype of the weight."""
        weight, rule = self.weight_as_conv().detach(), self.acting.output
        if rule is not None and rule.changes_values:
            return self.pruned(self.weight.dtype).output.reshape(self.weight.shape)
        mask = self.mask()
        pruned = weight.clone() if mask is None else weight.masked_fill(~mask, 0)
        return pruned.reshape(self.weight.shape)

    def rule_mask(self) -> Tensor:
        """Mask that the output GEMM's rule chooses for the weight as it is, as a convolution's."""
        weight, device = self.weight_as_conv().detach(), self.weight.device
        rule, generator = self.acting.output, self.seeded_generator(device)
        return rule.weight_mask(weight, "output", self.conv_groups, generator)

    def mask_of_weight(self) -> Tensor:
        """The kept mask, shaped and sharded as the weight."""
        return self.laid_out(self.state.kept_mask)

    def keep(self, mask: Tensor) -> None:
        """Prune the weight by ``mask`` (Cout, Cin/groups, kh, kw) until another one is kept."""
        kept = torch.empty_like(self.weight_as_conv(), dtype=torch.bool)
        self.state.kept_mask = kept.copy_(mask)

    def _kept_mask(self, weight: Tensor, trains: bool) -> Tensor | None:
        """The mask that is state, if one is: a training call chooses it anew when that is due."""
        state, interval = self.state, 1
        if self.acting.output is not None:
            interval = self.acting.output.keeps_mask_for
        if interval > 1 and trains and state.mask_step != state.step:
            if state.kept_mask is None or state.step % interval == 0:
                self.keep(self.rule_mask())
            state.mask_step = state.step
        if state.kept_mask is not None and state.kept_mask.device != weight.device:
            state.kept_mask = state.kept_mask.to(weight.device)
        return state.kept_mask

    def _call(self, input: Tensor, where: Geometry = (1, 0, 1)) -> Tensor:
        """The layer's output, with stride, padding and dilation as in `F.conv2d`."""
        run, groups, strategy = self.run, self.conv_groups, self.strategy
        trains = self.training and torch.is_grad_enabled()
        compiled = torch.compiler.is_compiling()
        if not compiled:
            checks.gathered(self.layer_name, self.weight)
        weight = self._as_conv(self._multiplied(self.weight))
        check_tensors(input, weight, self.bias, groups)
        dtype = compute_dtype(input, weight, self.bias)
        key = exact_key(input, dtype) if strategy.only_samples and not compiled else None
        if key in run.exact:
            return self._exactly(input, weight, where)
        self._ready_to_train(trains, compiled)
        strategy = self.acting  # a schedule may have started
        input, geometry = padded_geometry(input, weight, *where, groups)
        # The decay of a stored weight waits for the optimizer's step; a computed one has no step.
        stored = self.multiplies_parameter
        decay = strategy.gradient_decay if trains and not stored else 0.0
        call = Call(geometry, strategy, decay)
        with dispatch.recording(run.decisions):
            pruned = self._prune(weight, dtype, trains=trains and not compiled)
            if not compiled:
                draws = self._draws(input.device, trains)
                exact = None if key is None else run.exact
                call = Call(geometry, strategy, decay, *draws, exact, key)
                if trains and stored and strategy.decay and self.weight.requires_grad:
                    run.decay_mask = pruned.mask
            output = convolve_pruned(input, weight, self.bias, pruned, call)
        if trains and not compiled and strategy.schedule is not None:
            strategy.schedule.called(self, input, output)
        return output

    def _ready_to_train(self, trains: bool, compiled: bool) -> None:
        """Count a training call; raise where one cannot be made."""
        name, strategy, run = self.layer_name, self.strategy, self.run
        if compiled and self.training:
            checks.traceable(name, strategy)
        elif trains and not compiled:
            if is_managed(self):
                checks.shardable(self, name, strategy, self.state)
            checks.started(name, strategy, self.state, run)
            checks.ended(name, strategy, run)
            run.calls += 1

    def _exactly(self, input: Tensor, weight: Tensor, where: Geometry) -> Tensor:
        """The layer's output as the dense layer computes it."""
        return F.conv2d(input, weight, self.bias, *where, self.conv_groups)

    def _prune(self, weight: Tensor, dtype: torch.dtype, *, trains: bool) -> PrunedWeight:
        """S(W) and S(Wᵀ) of ``weight`` as it is, or as it was when it was frozen."""
        compiled = torch.compiler.is_compiling()
        frozen = None if compiled else self.run.frozen
        if frozen is not None:
            key = dtype, torch.is_inference_mode_enabled()
            if key in frozen:
                return frozen[key]
        groups, strategy = self.conv_groups, self.acting
        with torch.no_grad():
            mask, generator = self._kept_mask(weight, trains), None
            if strategy.draws_masks and not compiled:
                generator = self.seeded_generator(weight.device)
            pruned = prune_weight(weight, strategy, groups, dtype, generator, mask)
        if frozen is not None:
            frozen[key] = pruned
        return pruned

    def seeded_generator(self, device: torch.device, *where: int) -> torch.Generator | None:
        """A generator of (seed, layer, step, where), equal on all ranks; None without a seed."""
        return self.state.generator(self.layer_name, self.state.step, *where, device=device)

    def _draws(
        self, device: torch.device, trains: bool
    ) -> tuple[torch.Generator | None, int | None, dict[str, Any] | None]:
        """Generator, seed and memory of this call's rules on grad_output and input.

        The n-th call of a step remembers what the n-th call of the last one left. A frozen weight
        has no steps, and nothing to remember.
        """
        state, calls = self.state, self.run.calls
        generator = seed = memory = None
        if self.strategy.is_random and state.seed is not None:
            generator = self.seeded_generator(device, calls, state.seed[1])
            seed = generator.initial_seed()
        if self.strategy.has_memory and trains and self.weight.requires_grad:
            memory = state.memories.setdefault(calls - 1, {})
        return generator, seed, memory

    def __prepare_scriptable__(self) -> None:
        raise UsageError(
            f"layer {self.layer_name!r}: torch.jit.script cannot compile converted layers: script "
            "fst.fold(model), or train with torch.compile."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "run": RunState()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _LIVING[self] = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.run.has_loaded_weight |= f"{prefix}weight" in state_dict

    def _replicate_for_data_parallel(self) -> SparseLayer:
        replica = super()._replicate_for_data_parallel()
        replica.state, replica.run = copy.copy(self.state), RunState(start=self.run.start)
        return replica

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy}"


class SparseConv2d(SparseLayer, nn.Conv2d):
    """`nn.Conv2d` of which each GEMM's operands are pruned as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Conv2d

    @property
    def conv_groups(self) -> int:
        return int(self.groups)  # of NumPy's integers too

    def forward(self, input: Tensor) -> Tensor:
        """(N, Cin, H, W) -> (N, Cout, P, Q)."""
        if self.padding_mode == "zeros":
            return self._call(input, (self.stride, self.padding, self.dilation))
        edges = self._reversed_padding_repeated_twice
        input = F.pad(input, edges, mode=self.padding_mode)
        return self._call(input, (self.stride, 0, self.dilation))


class SparseLinear(SparseLayer, nn.Linear):
    """`nn.Linear` of which each GEMM's operands are pruned as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Linear

    def _as_conv(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, None, None]

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); positions as in `fst.sparse_linear`."""
        return linear_as_conv(input, self.weight, self._call)

    def _exactly(self, input: Tensor, weight: Tensor, where: Geometry) -> Tensor:
        output = F.linear(input.permute(0, 2, 3, 1), weight[:, :, 0, 0], self.bias)
        return output.permute(0, 3, 1, 2)


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """The converted layers of ``model`` by name."""
    check_module(model)
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLayer)}


def converted_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """`sparse_layers`, of which there must be one.

    Raises:
        ValueError: no layer of ``model`` is converted.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer; call fst.convert first.")
    return layers


def folded_to_another_class(layers: Iterable[SparseLayer]) -> str:
    """Those whose folded weight their own class would change, in words; "" if there is none."""
    kinds = Counter(
        f"{layer.dense_class.__name__} to {layer.folded_class.__name__}"
        for layer in layers
        if layer.folded_class is not layer.dense_class
    )
    return ", ".join(f"{count} from {kind}" for kind, count in kinds.items())


def living_layers() -> list[SparseLayer]:
    """All converted layers of this process, in the order of their conversion."""
    return list(_LIVING)
