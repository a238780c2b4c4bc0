"""Layers whose weight, Parameter object and state_dict stay those of the dense layer.

`fst.convert` turns a layer into one of these by changing its class, so that optimizers, hooks and
references held elsewhere stay valid.
"""

from __future__ import annotations

import abc
import copy
import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.backends import choice
from fst.basics.errors import UsageError
from fst.basics.values import check_module
from fst.layers import checks
from fst.layers.prepared import prepare
from fst.layers.remembered import LayerState, PassingState
from fst.layers.weights import PrunableWeight
from fst.ops.arguments import IntPair, check_tensors, compute_dtype, padded_geometry
from fst.ops.conv import NOTHING, Call, KnownCall, convolve_pruned, known_call, linear_as_conv
from fst.ops.geometry import LINEAR, Geometry
from fst.rules.strategy import Strategy

Window = tuple[IntPair, IntPair | str, IntPair]  # stride, padding, dilation
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
            strategy=strategy, layer_name=name, state=LayerState(), passing=PassingState()
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
        for name in ("strategy", "layer_name", "state", "passing"):
            delattr(self, name)
        _LIVING.pop(self, None)
        self.__class__ = plain  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """As the dense layer's; by its own code where nothing is pruned and no backend gains."""
        # The op's own calls take time. A small layer that gains nothing would be slower by them.
        known = NOTHING
        if not torch.compiler.is_compiling():
            known = known_call(input, self._parameters.get("weight"), self.state.record)
        if known.is_dense and (self.strategy.only_samples or self.is_too_small):
            return self.dense_class.forward(self, input)
        return self._sparse_forward(input, known)

    @property
    def is_too_small(self) -> bool:
        """True if the strategy can leave nothing of the layer's groups out: depthwise layers."""
        found = self.passing.too_small
        if found is None or found[0] is not self.strategy:
            filters, channels = self.weight.shape[:2]
            found = self.strategy, self.strategy.keeps_all(channels, filters // self.conv_groups)
            self.passing.too_small = found
        return found[1]

    @abc.abstractmethod
    def _sparse_forward(self, input: Tensor, known: KnownCall) -> Tensor:
        """Compute the layer through `_call`; shapes as the dense layer's."""

    def _call(self, input: Tensor, where: Window = (1, 0, 1), known: KnownCall = NOTHING) -> Tensor:
        """The layer's output: the operands, then the op.

        Args:
            where: stride, padding and dilation as in `F.conv2d`.
        """
        if torch.compiler.is_compiling():
            return self._traced_call(input, where)
        prepared = self.state.record.prepared.get(known.key) if known.is_dense else None
        if prepared is not None and prepared.fits(self, where):
            self._begin_training_call()
            return prepared.run(self, input)
        own, bias = self.weight, self.bias
        checks.refuse_sharded_weight(self.layer_name, own)
        weight, dtype = self._operands(input, own, bias, known)
        passing = self.passing
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self._begin_training_call()
        strategy, stored = self.acting, self.multiplies_parameter
        padded, geometry = self._geometry(input, weight, where)
        with choice.recording(self.state.record, is_dense=known.is_dense):
            pruned = self._prune(weight, dtype, trains=trains)
            draws = self._draws(input.device, trains)
            call = Call(geometry, strategy, self._decay_of_call(trains), *draws, trains, known)
            if trains and stored and strategy.decay and own.requires_grad:
                passing.decay_mask = pruned.mask  # the decay waits for the optimizer's step
            if known.is_dense and trains and padded is input:
                prepared = prepare(self, input, weight, dtype, call, where)
                if prepared is not None:
                    self.state.record.prepared[known.key] = prepared
            return convolve_pruned(padded, weight, bias, pruned, call)

    def _geometry(self, input: Tensor, weight: Tensor, where: Window) -> tuple[Tensor, Geometry]:
        """The input, padded as far as the geometry does not say it, and the geometry."""
        return padded_geometry(input, weight, *where, self.conv_groups)

    def _traced_call(self, input: Tensor, where: Window) -> Tensor:
        """`_call` inside torch.compile, where a layer remembers nothing of a call."""
        if self.training:
            checks.refuse_untraceable(self.layer_name, self.strategy)
        weight, dtype = self._operands(input, self.weight, self.bias)
        input, geometry = padded_geometry(input, weight, *where, self.conv_groups)
        decay = self._decay_of_call(self.training and torch.is_grad_enabled())
        pruned = self._prune(weight, dtype, trains=False)
        call = Call(geometry, self.acting, decay)
        return convolve_pruned(input, weight, self.bias, pruned, call)

    def _operands(
        self, input: Tensor, own: Tensor, bias: Tensor | None, known: KnownCall = NOTHING
    ) -> tuple[Tensor, torch.dtype]:
        """The weight (Cout, Cin/groups, kh, kw) made of the layer's own, and the dtype of the
        GEMMs; raises as the op.
        """
        weight = self._as_conv(self._multiplied(own))
        if not known.is_dense or own.device != input.device:
            check_tensors(input, weight, bias, self.conv_groups)
        return weight, compute_dtype(input, weight, bias)

    def _decay_of_call(self, trains: bool) -> float:
        """λ that the op adds to grad_weight: only a computed weight has no step of its own."""
        return self.acting.gradient_decay if trains and not self.multiplies_parameter else 0.0

    def _begin_training_call(self) -> None:
        """Start what is to start, and count the call; raises where the layer cannot train."""
        name, strategy, passing = self.layer_name, self.strategy, self.passing
        checks.refuse_flat_weight(self, name)
        checks.require_attachment(name, strategy, passing)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            checks.refuse_capture(name, strategy, is_seeded=self.state.seed is not None)
        if passing.start is not None and "started" not in self.state.schedule_state:
            passing.start()
        if self.weight.requires_grad:  # else it has no steps, and remembers nothing
            checks.refuse_endless_step(name, strategy, passing)
        passing.calls += 1

    def _draws(
        self, device: torch.device, trains: bool
    ) -> tuple[torch.Generator | None, int | None, dict[str, Any] | None]:
        """Generator, seed and memory of this call's rules on grad_output and input.

        The n-th call of a step remembers what the n-th call of the last one left. Nothing is
        remembered of a weight that needs no gradient: it has no steps.
        """
        state, calls = self.state, self.passing.calls
        generator = seed = memory = None
        if self.strategy.is_random and state.seed is not None:
            generator = self.seeded_generator(device, calls, state.seed[1])
            assert generator is not None  # of a seeded state
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
        return {**self.__dict__, "passing": PassingState()}

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
            self.passing.loaded_step = local_metadata.get(STEP, 0)

    def _replicate_for_data_parallel(self) -> SparseLayer:
        replica = super()._replicate_for_data_parallel()
        replica.state, replica.passing = (
            copy.copy(self.state),
            PassingState(start=self.passing.start),
        )
        return replica

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy}"


class SparseConv2d(SparseLayer, nn.Conv2d):
    """`nn.Conv2d` of which each GEMM's operands are pruned as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Conv2d

    @property
    def conv_groups(self) -> int:
        return int(self.groups)  # of NumPy's integers too

    def _sparse_forward(self, input: Tensor, known: KnownCall) -> Tensor:
        """(N, Cin, H, W) -> (N, Cout, P, Q)."""
        if self.padding_mode == "zeros":
            return self._call(input, (self.stride, self.padding, self.dilation), known)
        edges = self._reversed_padding_repeated_twice
        input = F.pad(input, edges, mode=self.padding_mode)
        return self._call(input, (self.stride, 0, self.dilation), known)


class SparseLinear(SparseLayer, nn.Linear):  # type: ignore[misc]  # bias may be None
    """`nn.Linear` of which each GEMM's operands are pruned as its strategy says."""

    dense_class: ClassVar[type[nn.Module]] = nn.Linear

    def _as_conv(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, None, None]

    def _geometry(self, input: Tensor, weight: Tensor, where: Window) -> tuple[Tensor, Geometry]:
        return input, LINEAR

    def _sparse_forward(self, input: Tensor, known: KnownCall) -> Tensor:
        """(..., in_features) -> (..., out_features); positions as in `fst.sparse_linear`."""
        return linear_as_conv(input, self.weight, functools.partial(self._call, known=known))


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """The converted layers of ``model`` by name, in the order of ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is no module.
    """
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
    """Layers whose own class would change a folded weight, in words; "" if there is none."""
    kinds = Counter(
        f"{layer.dense_class.__name__} to {layer.folded_class.__name__}"
        for layer in layers
        if layer.folded_class is not layer.dense_class
    )
    return ", ".join(f"{count} from {kind}" for kind, count in kinds.items())


def living_layers() -> list[SparseLayer]:
    """All converted layers of this process, in the order of their conversion."""
    return list(_LIVING)
