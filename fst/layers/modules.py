"""Layers whose weight, Parameter object and state_dict stay those of the dense layer.

`fst.convert` turns a layer into one of these by changing its class, so that optimizers, hooks and
references held elsewhere stay valid.
"""

from __future__ import annotations

import abc
import copy
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fst.backends import registry
from fst.basics.autocast import autocast_dtype, is_autocast
from fst.basics.errors import UsageError
from fst.basics.values import check_module
from fst.layers import checks
from fst.layers.remembered import LayerPlan, LayerState, TransientState
from fst.layers.weights import PrunableWeight
from fst.ops.arguments import check_tensors, compute_dtype, padded_geometry
from fst.ops.conv import (
    convolve_pruned,
    images_of_rows,
    refuse_double_backward,
    rows_of_images,
)
from fst.ops.geometry import LINEAR, Geometry
from fst.ops.operators import surroundings
from fst.ops.plan import NOTHING_DRAWN, CallPlan, Draws, draws_of
from fst.rules.strategy import Strategy

MOST_PLANS = 64  # forms of a call that a layer keeps
STEP = "fst.step"  # in the metadata of a state_dict
_LIVING: weakref.WeakKeyDictionary[SparseLayer, None] = weakref.WeakKeyDictionary()


class SparseLayer(PrunableWeight):
    """Base class of converted layers: conversion and back, a call, copies."""

    dense_class: ClassVar[type[nn.Module]]

    @classmethod
    def sparsify(cls, layer: nn.Module, strategy: Strategy, name: str) -> SparseLayer:
        """Turn a layer of `dense_class` into this class; parameters, hooks and all else stay."""
        layer.__class__ = cls
        layer.__dict__.update(
            strategy=strategy, layer_name=name, state=LayerState(), transient=TransientState()
        )
        sparse = cast(SparseLayer, layer)
        _LIVING[sparse] = None
        return sparse

    @classmethod
    def obstacle(cls, strategy: Strategy) -> str | None:
        """Why layers of this class cannot follow ``strategy``; None if they can."""
        return None

    @property
    def folded_class(self) -> type[nn.Module]:
        """The plain class that `densify` turns the layer into."""
        return self.dense_class

    def densify(self, weight: Tensor) -> None:
        """Become `folded_class`, with the values of ``weight``."""
        with torch.no_grad():
            self.weight.copy_(weight)
        self._become(self.folded_class)

    def restore(self) -> None:
        """Become `dense_class` again; the weight keeps its values."""
        self._become(self.dense_class)

    def _become(self, plain: type[nn.Module]) -> None:
        for name in ("strategy", "layer_name", "state", "transient"):
            delattr(self, name)
        _LIVING.pop(self, None)
        self.__class__ = plain  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """As the dense layer's, whose shapes it has."""
        if torch.compiler.is_compiling():
            return self._traced(input)
        transient, parameters = self.transient, self._parameters
        if transient.prunes_nothing is self.strategy:
            return self.dense_class.forward(self, input)
        weight: Any = parameters["weight"] if "weight" in parameters else self.weight
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if not isinstance(input, Tensor):
            check_tensors(input, weight, bias, 1)  # raises
        form = (
            (type(input), input.shape, input.stride(), input.dtype, input.device),
            (input.requires_grad, type(weight), weight.shape, weight.stride(), weight.dtype),
            (weight.device, weight.requires_grad, None if bias is None else bias.dtype),
            (self.training, torch.is_grad_enabled()),
            autocast_dtype(input.device) if is_autocast() else None,
            (id(self.strategy), transient.start is None, self._window(), registry.demands),
            (surroundings(), forward_ad._current_level, torch.get_num_threads()),
        )
        known = transient.plans.get(form)
        if known is None:
            known = self._plan(input, weight, bias)
            if transient.prunes_nothing is self.strategy:
                return self.dense_class.forward(self, input)
            if len(transient.plans) >= MOST_PLANS:
                transient.plans.clear()
            transient.plans[form] = known
        return self._run(known, input, weight, bias)

    @property
    def is_too_small(self) -> bool:
        """True if the strategy can leave nothing of the layer's groups out: depthwise layers."""
        found = self.transient.too_small
        if found is None or found[0] is not self.strategy:
            filters, channels = self.weight.shape[:2]
            found = self.strategy, self.strategy.keeps_all(channels, filters // self.conv_groups)
            self.transient.too_small = found
        return found[1]

    @abc.abstractmethod
    def _window(self) -> tuple[Any, ...]:
        """The layer's own attributes that decide how it computes; hashable."""

    def _maps(self, input: Tensor) -> Tensor:
        """The input as the op takes it, (N, Cin, H, W)."""
        return input

    @abc.abstractmethod
    def _geometry(self, input: Tensor, weight: Tensor) -> tuple[Tensor, Geometry]:
        """The input, padded as far as the geometry does not say it, and the geometry."""

    def _result(self, output: Tensor, input: Tensor) -> Tensor:
        """(N, Cout, P, Q) as the layer's output."""
        return output

    def _plan(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> LayerPlan:
        """Check the operands of a call, and plan calls of this form.

        Raises:
            TypeError, ValueError, RuntimeError: as the op does.
        """
        trains = self.training and torch.is_grad_enabled()
        checks.refuse_sharded_weight(self.layer_name, weight)
        if trains:
            checks.refuse_flat_weight(self, self.layer_name)
            checks.require_attachment(self.layer_name, self.strategy, self.transient)
            if self.transient.start is not None and "started" not in self.state.schedule_state:
                self.transient.start()
        strategy = self.current_strategy
        maps, multiplied = self._maps(input), self._as_conv(self._multiplied(weight))
        check_tensors(maps, multiplied, bias, self.conv_groups)
        padded, geometry = self._geometry(maps, multiplied)
        dtype = compute_dtype(maps, multiplied, bias)
        if self.is_too_small if strategy.prunes else not strategy.skips_zeros:
            self.transient.prunes_nothing = self.strategy
        stored = self.multiplies_parameter
        return LayerPlan(
            plan=CallPlan(strategy, geometry, dtype, self.state.record, trains=trains),
            held=self.strategy,
            is_plain=type(self)._maps is SparseLayer._maps and padded is maps,
            multiplies_own=stored and multiplied is weight,
            remembers_mask=bool(trains and stored and strategy.decay and weight.requires_grad),
            decay=strategy.gradient_decay if trains and not stored else 0.0,
            remembers=strategy.has_memory and weight.requires_grad,  # else there are no steps
            keeps_mask=strategy.keeps_masks or self.state.kept_mask is not None,
        )

    def _run(self, known: LayerPlan, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, and the notes of a training call."""
        state, transient, plan = self.state, self.transient, known.plan
        record, strategy = state.record, plan.strategy
        if plan.trains:
            if input.is_cuda and is_capturing():
                is_seeded = state.seed is not None
                checks.refuse_capture(self.layer_name, self.strategy, is_seeded=is_seeded)
            if known.remembers:
                checks.refuse_endless_step(self.layer_name, strategy, transient)
            transient.calls += 1
            record.decisions.update(plan.decisions)
        is_dense = plan.dense_since < state.step and not record.counting
        if is_dense and strategy.only_samples and forward_ad._current_level < 0:
            output = self.dense_class.forward(self, input)
            if output.requires_grad and not strategy.prunes_only_weights:
                output.register_hook(self._refuse_double_backward)
            return output
        multiplied = weight
        if not known.multiplies_own:
            multiplied = self._as_conv(self._multiplied(weight))
        maps = input if known.is_plain else self._geometry(self._maps(input), multiplied)[0]
        if transient.frozen_block is None and not known.keeps_mask:
            generator = self.seeded_generator(weight.device) if strategy.draws_masks else None
            pruned = plan.prune(multiplied.detach(), generator)
        else:
            pruned = self._pruned(plan, multiplied, trains=plan.trains)
        if known.remembers_mask:
            transient.decay_mask = weight, weight._version, pruned.mask
        draws = self._draws(input, plan.trains) if strategy.has_draws else NOTHING_DRAWN
        counts = plan.trains and record.counting and transient.calls == 1
        output = convolve_pruned(
            *(maps, multiplied, bias, plan, pruned, draws, known.decay),
            counts=counts,
            step=state.step,
            is_dense=is_dense,
        )
        return output if known.is_plain else self._result(output, input)

    def _refuse_double_backward(self, grad_output: Tensor) -> None:
        if torch.is_grad_enabled():
            refuse_double_backward(self.strategy)

    def _traced(self, input: Tensor) -> Tensor:
        """The layer's output inside torch.compile, where a layer remembers nothing of a call."""
        if self.training:
            checks.refuse_untraceable(self.layer_name, self.strategy)
        strategy, trains = self.current_strategy, self.training and torch.is_grad_enabled()
        maps, weight = self._maps(input), self._as_conv(self._multiplied(self.weight))
        check_tensors(maps, weight, self.bias, self.conv_groups)
        padded, geometry = self._geometry(maps, weight)
        dtype = compute_dtype(maps, weight, self.bias)
        plan = CallPlan(strategy, geometry, dtype, self.state.record, trains=False)
        pruned = plan.prune(weight.detach(), mask=self._due_mask(weight, trains=False))
        decay = strategy.gradient_decay if trains and not self.multiplies_parameter else 0.0
        draws = draws_of(strategy, input)
        output = convolve_pruned(padded, weight, self.bias, plan, pruned, draws, decay)
        return self._result(output, input)

    def _draws(self, input: Tensor, trains: bool) -> Draws:
        """The draws of this call's rules on grad_output and input.

        The n-th call of a step remembers what the n-th call of the last one left. Nothing is
        remembered of a weight that needs no gradient: it has no steps.
        """
        state, calls, strategy = self.state, self.transient.calls, self.current_strategy
        generator = seed = memory = None
        if strategy.is_random and state.seed is not None:
            generator = self.seeded_generator(input.device, calls, state.seed[1])
            assert generator is not None
            seed = generator.initial_seed()
        if strategy.has_memory and trains and self.weight.requires_grad:
            memory = state.memories.setdefault(calls - 1, {})
        return draws_of(strategy, input, generator, seed, memory)

    def __prepare_scriptable__(self) -> None:
        raise UsageError(
            f"layer {self.layer_name!r}: torch.jit.script cannot compile converted layers: script "
            "fst.fold(model), or train with torch.compile."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "transient": TransientState()}

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLayer:
        """A copy as pickling makes it; torch's parametrizations forbid that, and copy all."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(SparseLayer.__getstate__(self), memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _LIVING[self] = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As the dense layer; the metadata, which `torch.save` keeps, say how far training is."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix.removesuffix("."), {})[STEP] = self.state.step

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if f"{prefix}weight" in state_dict:
            self.transient.loaded_step = local_metadata.get(STEP, 0)

    def _replicate_for_data_parallel(self) -> SparseLayer:
        replica = super()._replicate_for_data_parallel()
        replica.state, replica.transient = (
            copy.copy(self.state),
            TransientState(start=self.transient.start),
        )
        return replica

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy}"


class SparseConv2d(SparseLayer, nn.Conv2d):
    """`nn.Conv2d` that prunes the operands of each GEMM as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Conv2d

    @property
    def conv_groups(self) -> int:
        return int(self.groups)  # an integer of NumPy's is allowed

    def _window(self) -> tuple[Any, ...]:
        where = self.stride, self.padding, self.dilation
        if list in (type(where[0]), type(where[1]), type(where[2])):  # a list has no hash
            where = tuple(map(str, where))  # type: ignore[assignment]
        return where, self.groups, self.padding_mode

    def _geometry(self, input: Tensor, weight: Tensor) -> tuple[Tensor, Geometry]:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            edges = self._reversed_padding_repeated_twice
            input, padding = F.pad(input, edges, mode=self.padding_mode), 0
        groups = self.conv_groups
        return padded_geometry(input, weight, self.stride, padding, self.dilation, groups)


class SparseLinear(SparseLayer, nn.Linear):  # type: ignore[misc]  # bias may be None
    """`nn.Linear` that prunes the operands of each GEMM as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Linear

    def _as_conv(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, None, None]

    def _window(self) -> tuple[Any, ...]:
        return ()

    def _maps(self, input: Tensor) -> Tensor:
        return images_of_rows(input, self.weight)

    def _geometry(self, input: Tensor, weight: Tensor) -> tuple[Tensor, Geometry]:
        return input, LINEAR

    def _result(self, output: Tensor, input: Tensor) -> Tensor:
        return rows_of_images(output, input)


def is_capturing() -> bool:
    """True while a CUDA graph is captured; initializes no driver."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """The converted layers of ``model`` by name, in the order of ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_module(model)
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLayer)}


def converted_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """`sparse_layers` of a model that has some.

    Raises:
        ValueError: no layer of ``model`` is converted.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer; call fst.convert first.")
    return layers


def folded_to_another_class(layers: Iterable[SparseLayer]) -> str:
    """Layers whose own class would change a folded weight, as text; "" if there is none."""
    kinds = Counter(
        f"{layer.dense_class.__name__} to {layer.folded_class.__name__}"
        for layer in layers
        if layer.folded_class is not layer.dense_class
    )
    return ", ".join(f"{count} from {kind}" for kind, count in kinds.items())


def living_layers() -> list[SparseLayer]:
    """All converted layers of this process, in the order of their conversion."""
    return list(_LIVING)
