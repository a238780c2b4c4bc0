"""Layers whose weight, Parameter object and state_dict stay those of the dense layer.

`fst.convert` turns a layer into one of these by changing its class, so that optimizers, hooks and
references held elsewhere stay valid.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.ops.conv import (
    IntPair,
    check_linear,
    check_tensors,
    compute_dtype,
    convolve_pruned,
    linear_as_conv,
)
from fst.ops.prune import PrunedWeight, prune_weight, weight_mask
from fst.report import GemmReport, LayerReport, describe_gemms
from fst.strategy import Strategy, Transposable

# What copies and pickles of a layer start without.
_OF_THIS_RUN: dict[str, Any] = {
    "attached": False,
    "scale_decay": None,
    "_pruned": None,
    "_pruned_from": None,
    "_decay_pending": False,
    "_calls": 0,
}


class SparseLayer(nn.Module):
    """What converted layers share: S(W), computed once per step, and the state of their rules.

    Attributes:
        strategy: what is pruned.
        layer_name: the layer's name in the converted model.
        step: training steps seen (distinct weights that were trained on).
        kept_mask: mask of a rule that keeps its mask for several steps, else None.
    """

    dense_class: ClassVar[type[nn.Module]]
    weight: Tensor
    bias: Tensor | None

    strategy: Strategy
    layer_name: str
    step: int
    kept_mask: Tensor | None
    attached: bool
    scale_decay: Callable[[Tensor], Tensor] | None
    _seed: tuple[int, int] | None
    _pruned: PrunedWeight | None
    _pruned_from: tuple[object, ...] | None
    _decay_pending: bool
    _calls: int

    @classmethod
    def sparsify(cls, layer: nn.Module, strategy: Strategy, name: str) -> SparseLayer:
        """Turn a layer of `dense_class` into this class; parameters, hooks and all else stay."""
        layer.__class__ = cls
        kept = {"strategy": strategy, "layer_name": name, "step": 0, "kept_mask": None}
        layer.__dict__.update(kept, _seed=None, **_OF_THIS_RUN)
        return layer

    def densify(self, weight: Tensor) -> None:
        """Become `dense_class` again, with the values of ``weight``."""
        with torch.no_grad():
            self.weight.copy_(weight)
        for name in ("strategy", "layer_name", "step", "kept_mask", "_seed", *_OF_THIS_RUN):
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
        mask = self._current(self.weight.dtype).mask
        return None if mask is None else mask.view(self.weight.shape)

    def effective_weight(self) -> Tensor:
        """S(W), what the output GEMM multiplies with, in the dtype of the weight."""
        mask = self.output_mask()
        weight = self.weight.detach()
        return weight.clone() if mask is None else weight.masked_fill(~mask, 0)

    def report(self) -> LayerReport:
        """Per GEMM: dense, simulated or accelerated, and why."""
        gemms: dict[str, GemmReport] = describe_gemms(self)
        return LayerReport(self.layer_name, tuple(self.weight.shape), gemms)

    def decay_weight(self) -> None:
        """W ← W − λ(W − S(W)) in place (FST, Eq. 6)."""
        mask = self.output_mask()
        if mask is not None:
            with torch.no_grad():
                self.weight.sub_(self.weight * ~mask, alpha=self.strategy.decay)

    def seed_random_rules(self, seed: int, rank: int) -> None:
        """Draw random rules from (seed, layer, step), and rank where ranks must differ."""
        self._seed = (seed, rank)

    def train(self, mode: bool = True) -> SparseLayer:
        """Also drops S(W): weights may have been exchanged through ``.data`` in between."""
        self._pruned = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_OF_THIS_RUN}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy}"

    def _run(
        self,
        input: Tensor,
        stride: IntPair = 1,
        padding: IntPair | str = 0,
        dilation: IntPair = 1,
    ) -> Tensor:
        weight = self.weight_as_conv()
        groups, strategy = self.conv_groups, self.strategy
        check_tensors(input, weight, self.bias, groups)
        dtype = compute_dtype(input, weight)
        if torch.compiler.is_compiling():
            self._check_traceable()
            with torch.no_grad():
                pruned = prune_weight(weight, strategy, groups, dtype)
            decay, generator, phase, consumed = strategy.gradient_decay, None, None, None
        else:
            pruned = self._current(dtype)
            decay = self._take_decay(dtype)
            generator, phase = self._draws(input.device)
            consumed = self._consume
        return convolve_pruned(
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
            scale_decay=self.scale_decay,
            on_backward=consumed,
        )

    def _current(self, dtype: torch.dtype) -> PrunedWeight:
        """S(W) and S(Wᵀ), pruned anew only when the weight has changed.

        A weight has changed when its version or storage has, when a backward pass has used it, or
        when the layer was switched between train and eval.
        """
        weight = self.weight
        version = None if weight.is_inference() else weight._version
        origin = (version, weight.data_ptr(), weight.device, dtype)
        if self._pruned is not None and version is not None and self._pruned_from == origin:
            return self._pruned
        with torch.no_grad():
            mask = self._mask_to_keep()
            generator = self._generator(weight.device, ranked=False)
            self._pruned = prune_weight(
                self.weight_as_conv(), self.strategy, self.conv_groups, dtype, generator, mask
            )
        self._pruned_from = origin
        self._decay_pending = True
        self._calls = 0
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return self._pruned

    def _mask_to_keep(self) -> Tensor | None:
        rule = self.strategy.output
        if not isinstance(rule, Transposable):
            return None
        training = self.training and torch.is_grad_enabled()
        if self.kept_mask is None or (training and self.step % rule.interval == 0):
            self.kept_mask = weight_mask(
                self.weight_as_conv().detach(), rule, "output", self.conv_groups
            )
        self.kept_mask = self.kept_mask.to(self.weight.device)
        return self.kept_mask

    def _take_decay(self, dtype: torch.dtype) -> float:
        """λ for the first call after the weight changed, 0 for further calls in the same step."""
        if not (self.training and torch.is_grad_enabled() and self.strategy.decay):
            return 0.0
        if self.strategy.decay_mode == "decoupled" and not self.attached:
            raise RuntimeError(
                f"layer {self.layer_name!r}: decay_mode='decoupled' works at the optimizer's step; "
                "call fst.attach(model, optimizer) before training."
            )
        if dtype == torch.float16 != self.weight.dtype and self.scale_decay is None:
            warnings.warn(
                "float16 autocast without fst.set_grad_scaler(model, scaler): if the loss is "
                "scaled, SR-STE's decay is too weak by that scale.",
                stacklevel=3,
            )
        pending, self._decay_pending = self._decay_pending, False
        return self.strategy.gradient_decay if pending else 0.0

    def _consume(self) -> None:
        self._pruned = None

    def _check_traceable(self) -> None:
        rule = self.strategy.output
        if isinstance(rule, Transposable) and rule.interval > 1 and self.training:
            raise RuntimeError(
                f"layer {self.layer_name!r}: a mask kept for interval={rule.interval} steps is "
                "state that torch.compile cannot trace; use interval=1 to train compiled."
            )

    def _generator(self, device: torch.device, *, ranked: bool) -> torch.Generator | None:
        rules = (self.strategy.output, self.strategy.grad_input, self.strategy.grad_weight)
        if self._seed is None or not any(rule is not None and rule.is_random for rule in rules):
            return None
        seed, rank = self._seed
        parts = (seed, self.layer_name, self.step, self._calls if ranked else "w")
        digest = hashlib.blake2b(repr((*parts, rank if ranked else 0)).encode(), digest_size=7)
        generator = torch.Generator(device)
        return generator.manual_seed(int.from_bytes(digest.digest(), "big"))

    def _draws(self, device: torch.device) -> tuple[torch.Generator | None, int | None]:
        """Generator of this call's random rules, and the phase where that is drawn."""
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
