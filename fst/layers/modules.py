"""Layers whose weight, Parameter object and state_dict stay those of the dense layer.

`fst.convert` turns a layer into one of these by changing its class, so that optimizers, hooks and
references held elsewhere stay valid.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.backends import dispatch
from fst.layers import needs
from fst.layers.network import KnownWeights, Network
from fst.layers.watcher import watch_gradient
from fst.ops import gemms
from fst.ops import triton as ops
from fst.ops.arguments import IntPair, check_linear, check_tensors, compute_dtype
from fst.ops.conv import convolve_pruned, linear_as_conv
from fst.ops.prune import PrunedWeight, apply_mask, prune_weight, weight_mask
from fst.ops.reuse import ReuseMemory
from fst.ops.sparse24 import PackedWeight
from fst.report import GemmReport, LayerReport, describe_gemms
from fst.rules.nm import NM, Transposable
from fst.rules.strategy import Strategy

# What a layer remembers, and copies and checkpoints with it (the seed is the caller's to set).
_STATE: dict[str, Any] = {
    "step": 0,
    "kept_mask": None,
    "schedule_state": {},
    "memories": {},
    "_seed": None,
}
# What copies and pickles of a layer start without.
_OF_THIS_RUN: dict[str, Any] = {
    "attached": False,
    "start_schedule": None,
    "scale_decay": None,
    "pruned": KnownWeights(),
    "_mask_step": None,
    "_calls": 0,
    "_zeros": {},
    "decisions": {},
}


class SparseLayer(nn.Module):
    """What converted layers share: S(W), computed once per step, and the state of their rules.

    Attributes:
        strategy: what is pruned.
        layer_name: the layer's name in the converted model.
        step: training steps whose gradient has arrived.
        kept_mask: mask of the weight, as a convolution's, if it is kept for several steps.
        schedule_state: what the strategy's schedule remembers of this layer, by name.
        memories: what the rule `Reuse` keeps, by the call's number within a step.
        pruned: S(W) and S(Wᵀ), as long as they are those of the weight.
        network: the layers whose weights may be pruned with this one's.
        decisions: operation -> which backend computed it last, and why.
    """

    dense_class: ClassVar[type[nn.Module]]
    weight: Tensor
    bias: Tensor | None

    strategy: Strategy
    layer_name: str
    step: int
    kept_mask: Tensor | None
    schedule_state: dict[str, Any]
    memories: dict[int, ReuseMemory]
    decisions: dispatch.Record
    pruned: KnownWeights
    network: Network
    attached: bool
    start_schedule: Callable[[], None] | None
    scale_decay: Callable[[Tensor], Tensor] | None
    _seed: tuple[int, int] | None
    _mask_step: int | None
    _calls: int
    _zeros: dict[str, tuple[Tensor, int]]

    @classmethod
    def sparsify(
        cls, layer: nn.Module, strategy: Strategy, name: str, network: Network
    ) -> SparseLayer:
        """Turn a layer of `dense_class` into this class; parameters, hooks and all else stay."""
        layer.__class__ = cls
        layer.__dict__.update(strategy=strategy, layer_name=name, network=network)
        layer.__dict__.update(copy.deepcopy({**_STATE, **_OF_THIS_RUN}))
        network.add(layer)
        return layer

    def densify(self, weight: Tensor) -> None:
        """Become `dense_class` again, with the values of ``weight``."""
        with torch.no_grad():
            self.weight.copy_(weight)
        self.network.remove(self)
        for name in ("strategy", "layer_name", "network", *_STATE, *_OF_THIS_RUN):
            delattr(self, name)
        self.__class__ = self.dense_class

    @property
    def conv_groups(self) -> int:
        """Groups of the convolution; 1 for linear layers."""
        return 1

    def weight_as_conv(self) -> Tensor:
        """The weight as (Cout, Cin/groups, kh, kw)."""
        return self.weight

    def output_mask(self) -> Tensor | None:
        """Mask of the weight in the output GEMM (True = kept), or None where that is dense."""
        mask = self._mask()
        return None if mask is None else mask.clone()

    def _mask(self) -> Tensor | None:
        """`output_mask`, but its memory is that of the next step's mask too."""
        known = self.pruned.of(self.weight)
        mask = self._current(next(iter(known), self.weight.dtype)).mask
        return None if mask is None else mask.view(self.weight.shape)

    def rule_mask(self) -> Tensor:
        """Mask that the output GEMM's rule chooses for the weight as it is, as a convolution's."""
        rule, weight = self.strategy.output, self.weight_as_conv().detach()
        return weight_mask(weight, rule, "output", self.conv_groups)

    def mask_of_weight(self) -> Tensor:
        """The kept mask, in the weight's shape."""
        return self.kept_mask.to(self.weight.device).reshape(self.weight.shape)

    def keep(self, mask: Tensor) -> None:
        """Prune the weight by ``mask`` (Cout, Cin/groups, kh, kw) until another one is kept."""
        kept = torch.empty_like(self.weight_as_conv(), dtype=torch.bool)
        self.kept_mask = kept.copy_(mask)
        self.forget_pruned()

    def effective_weight(self) -> Tensor:
        """S(W), what the output GEMM multiplies with, in the dtype of the weight."""
        mask = self._mask()
        weight = self.weight.detach()
        return weight.clone() if mask is None else weight.masked_fill(~mask, 0)

    def report(self) -> LayerReport:
        """Per GEMM: dense, simulated or accelerated, and why."""
        gemms: dict[str, GemmReport] = describe_gemms(self)
        return LayerReport(self.layer_name, tuple(self.weight.shape), gemms)

    def decay_weight(self) -> None:
        """W ← W − λ(W − S(W)) in place (FST, Eq. 6)."""
        mask = self._mask()
        if mask is not None:
            with torch.no_grad():
                self.weight.sub_(self.weight * ~mask, alpha=self.strategy.decay)

    def zero_shares(self) -> dict[str, Tensor]:
        """Share of zeros in "input" and "grad_output" in training, if the strategy counts them.

        Over all steps since the layer was converted, or since `restart_counting`. The values stay
        on the device. Not part of checkpoints, and not counted in compiled code.
        """
        return {operand: zeros / elements for operand, (zeros, elements) in self._zeros.items()}

    def restart_counting(self) -> None:
        """Start `zero_shares` anew."""
        self._zeros = {}

    def seed_random_rules(self, seed: int, rank: int) -> None:
        """Draw random rules from (seed, layer, step), and rank where ranks must differ."""
        self._seed = (seed, rank)

    def train(self, mode: bool = True) -> SparseLayer:
        """Also drops S(W): weights may have been exchanged through ``.data`` in between."""
        self.forget_pruned()
        return super().train(mode)

    def forget_pruned(self) -> None:
        """Drop S(W): the next call prunes the weight anew."""
        self.pruned.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **copy.deepcopy(_OF_THIS_RUN)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.network.add(self)

    def _replicate_for_data_parallel(self) -> SparseLayer:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__.update(pruned=KnownWeights(), network=Network())
        return replica

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy}"

    def _run(self, input: Tensor, *geometry: Any) -> Tensor:
        with dispatch.recording(self.decisions):
            return self._convolve(input, *geometry)

    def _convolve(
        self,
        input: Tensor,
        stride: IntPair = 1,
        padding: IntPair | str = 0,
        dilation: IntPair = 1,
    ) -> Tensor:
        weight = self.weight_as_conv()
        groups, strategy = self.conv_groups, self.strategy
        check_tensors(input, weight, self.bias, groups)
        dtype = compute_dtype(input, weight, self.bias)
        decay = 0.0
        if torch.compiler.is_compiling():
            needs.traceable_state(self)
            kept = None if self.training else self.kept_mask
            with torch.no_grad():
                pruned = prune_weight(weight, strategy, groups, dtype, mask=kept)
                packed = None
                if kept is None:
                    (packed,) = gemms.pack([weight], [groups], strategy, dtype)
            decay, generator, phase, memory = strategy.gradient_decay, None, None, None
        else:
            if self.training and torch.is_grad_enabled():
                decay = self._prepare_step(dtype)
            pruned, packed = self._current(dtype), self._packed(dtype)
            self.pruned.use(dtype, pruned, packed)
            generator, phase = self._draws(input.device)
            memory = self._memory()
        output = convolve_pruned(
            input,
            weight,
            self.bias,
            pruned,
            stride,
            padding,
            dilation,
            groups,
            strategy,
            decay=decay,
            generator=generator,
            phase=phase,
            memory=memory,
            packed=packed,
        )
        counts = strategy.count_zeros and self.training and output.requires_grad
        if counts and not torch.compiler.is_compiling():
            self._count_zeros("input", input)
            output.register_hook(partial(self._count_zeros, "grad_output"))
        return output

    def _count_zeros(self, operand: str, tensor: Tensor) -> None:
        zeros, elements = self._zeros.get(operand, (0, 0))
        zeros = tensor.numel() - torch.count_nonzero(tensor.detach()) + zeros
        self._zeros[operand] = zeros, elements + tensor.numel()

    def _current(self, dtype: torch.dtype) -> PrunedWeight:
        """S(W) and S(Wᵀ), pruned anew only when the weight has changed.

        A weight has changed when its version or storage has, when its gradient has arrived since,
        or when the layer was switched between train and eval.
        """
        weight, known = self.weight, self.pruned.of(self.weight)
        self.network.used(self)
        if dtype in known:
            return known[dtype]
        mask = self._mask_to_keep()
        if known and not self.pruned.by_kernel:
            mask = next(iter(known.values())).mask
        reuse = self.pruned.spare(weight, dtype)
        with torch.no_grad():
            pruned = prune_weight(
                self.weight_as_conv(),
                self.strategy,
                self.conv_groups,
                dtype,
                self._generator(weight.device, ranked=False),
                mask,
                reuse,
                partial(self.network.prune, self, dtype, reuse),
            )
        self.pruned.add(weight, dtype, pruned)
        return pruned

    def _packed(self, dtype: torch.dtype) -> PackedWeight | None:
        """The weight for the sparse kernels, if one of them may run."""
        if self.kept_mask is not None or not gemms.wants_packing(self.strategy, dtype):
            return None
        known = self.pruned.packed(self.weight, dtype)
        return self.network.pack(self, dtype) if known is None else known

    def _mask_to_keep(self) -> Tensor | None:
        if self.kept_mask is None and isinstance(self.strategy.output, Transposable):
            self.kept_mask = self.rule_mask()
        if self.kept_mask is not None:
            self.kept_mask = self.kept_mask.to(self.weight.device)
        return self.kept_mask

    def _prepare_step(self, dtype: torch.dtype) -> float:
        """Before a training call; returns the λ that the op itself must add to the gradient."""
        rule = self.strategy.output
        if isinstance(rule, Transposable) and self._mask_step != self.step:
            if self.step % rule.interval == 0:
                self.kept_mask = None
                self.forget_pruned()
            self._mask_step = self.step
        if self.strategy.schedule is not None:
            needs.attachment(self)
            if "started" not in self.schedule_state:
                self.start_schedule()
        if self.strategy.decay:
            needs.decay(self, dtype)
        if not self.weight.requires_grad:
            return 0.0
        if not self.weight.is_leaf:
            return self.strategy.gradient_decay
        watch_gradient(self)
        return 0.0

    def gradient_arrived(self, new_step: bool) -> None:
        """After a backward pass: the weight may change from now on."""
        self.forget_pruned()
        self.network.gradient_arrived()
        for call in [call for call in self.memories if call >= self._calls]:
            del self.memories[call]
        if self._calls:
            self._calls = 0
        self.step += new_step

    def add_decay(self, gradient: Tensor) -> None:
        """gradient += λ(W − S(W)), scaled as the loss is."""
        decay = self.strategy.gradient_decay
        if not decay:
            return
        if self._kernel_decays(gradient):
            weight, rule = self.weight_as_conv().detach(), self.strategy.output
            gradients, groups = [gradient.view(weight.shape)], [self.conv_groups]
            ops.add_decay([weight], gradients, groups, rule.n, rule.m, decay)
            return
        with torch.no_grad():
            residual = apply_mask(self.weight, ~self._mask())
            if self.scale_decay is not None:
                residual = self.scale_decay(residual)
            gradient.add_(residual, alpha=decay)

    def _kernel_decays(self, gradient: Tensor) -> bool:
        """Whether the kernel that pruned the weight can also add the decay to its gradient."""
        rule, weight = self.strategy.output, self.weight
        by_kernel = self.pruned.by_kernel and isinstance(rule, NM)
        plain = self.kept_mask is None and self.scale_decay is None
        alike = (gradient.dtype, gradient.stride()) == (weight.dtype, weight.stride())
        return by_kernel and plain and alike

    def _memory(self) -> ReuseMemory | None:
        """The memory of this training call: the n-th call of a step continues the last n-th one."""
        if not self.strategy.has_memory:
            return None
        # a frozen weight's gradient never arrives, so that steps could not be told apart
        watched = self.weight.requires_grad and self.weight.is_leaf
        if not (watched and self.training and torch.is_grad_enabled()):
            return None
        return self.memories.setdefault(self._calls - 1, ReuseMemory())

    def _generator(self, device: torch.device, *, ranked: bool) -> torch.Generator | None:
        rules = (self.strategy.output, self.strategy.grad_input, self.strategy.grad_weight)
        if self._seed is None or not any(rule is not None and rule.is_random for rule in rules):
            return None
        where = (self._calls, self._seed[1]) if ranked else ()
        return self.seeded_generator(device, *where)

    def seeded_generator(self, device: torch.device, *where: int) -> torch.Generator | None:
        """A generator of (seed, layer, step, where), equal on all ranks; None without a seed."""
        if self._seed is None:
            return None
        key = repr((self._seed[0], self.layer_name, self.step, *where))
        digest = hashlib.blake2b(key.encode(), digest_size=7)
        generator = torch.Generator(device)
        return generator.manual_seed(int.from_bytes(digest.digest(), "big"))

    def _draws(self, device: torch.device) -> tuple[torch.Generator | None, int | None]:
        """Generator of this call's random rules, and the phase where that is drawn."""
        if self._seed is None and not self.strategy.has_memory:
            return None, None
        if self.training and torch.is_grad_enabled():  # so that validation shifts no draws
            self._calls += 1
        generator = self._generator(device, ranked=True)
        if generator is None:
            return None, None
        rule = self.strategy.grad_weight
        is_drawn = getattr(rule, "phase", None) == "random"
        return generator, generator.initial_seed() % 2 if is_drawn else None


class SparseConv2d(SparseLayer, nn.Conv2d):
    """`nn.Conv2d` of which each GEMM's operands are pruned as its strategy says."""

    dense_class = nn.Conv2d

    @property
    def conv_groups(self) -> int:
        return self.groups

    def forward(self, input: Tensor) -> Tensor:
        """(N, Cin, H, W) -> (N, Cout, P, Q)."""
        if self.padding_mode == "zeros":
            return self._run(input, self.stride, self.padding, self.dilation)
        edges = self._reversed_padding_repeated_twice
        input = F.pad(input, edges, mode=self.padding_mode)
        return self._run(input, self.stride, 0, self.dilation)


class SparseLinear(SparseLayer, nn.Linear):
    """`nn.Linear` of which each GEMM's operands are pruned as its strategy says."""

    dense_class = nn.Linear

    def weight_as_conv(self) -> Tensor:
        return self.weight[:, :, None, None]

    def forward(self, input: Tensor) -> Tensor:
        """(N, ..., in_features) -> (N, ..., out_features)."""
        check_linear(input, self.weight)
        return linear_as_conv(input, self.weight, self._run)


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """The converted layers of ``model`` by name."""
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
