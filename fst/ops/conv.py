"""The one autograd op: a convolution of which each GEMM's operands may be pruned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import dispatch
from fst.basics.autocast import without_autocast
from fst.ops import alternating, gemms
from fst.ops.arguments import IntPair, check_linear, padded_geometry
from fst.ops.geometry import Geometry, gradients, input_gradient
from fst.ops.prune import (
    PrunedWeight,
    apply_mask,
    grad_weight_pruned_input,
    prune_grad_output,
)
from fst.ops.reuse import ReuseMemory
from fst.ops.sparse24 import PackedWeight
from fst.rules.alternating import Alternating
from fst.rules.gradient import WholeGradient
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy


class Call(NamedTuple):
    """What one call of the op needs besides its tensors.

    Attributes:
        phase: which of a pair the alternating rule keeps in this call.
        generator: source of randomness of random rules on grad_output and input.
        decay: λ of the term λ(W − S(W)) that this call adds to grad_weight.
        memory: what the rule `Reuse` keeps from one backward pass to the next.
    """

    geometry: Geometry
    strategy: Strategy
    phase: int
    generator: torch.Generator | None
    decay: float
    memory: ReuseMemory | None


class _SparseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_output: Tensor,
        weight_grad_input: Tensor,
        mask: Tensor | None,
        call: Call,
        *packed: Tensor,
    ) -> Tensor:
        """``packed``: the members of a `PackedWeight`, or nothing."""
        output = gemms.output(input, weight_output, bias, call.geometry, call.strategy, packed)
        rule = call.strategy.grad_weight
        ctx.call = call
        ctx.record = dispatch.current_record()
        ctx.input_shape = input.shape
        ctx.kept, ctx.reduced = (), False
        inputs = [input]
        if not weight.requires_grad:
            inputs = []
        elif isinstance(rule, Alternating):
            size = (output.shape[2], output.shape[3])
            ctx.kept = alternating.lattices(rule, call.phase, *size)
            ctx.reduced = weight.shape[2:] == (1, 1) and not alternating.is_retained(input)
            if ctx.reduced:
                inputs = alternating.kept_input(input, ctx.kept, size, call.geometry)
        decay_mask = mask if call.decay else None
        transposed = gemms.for_grad_input(call.strategy, packed)
        ctx.packed, ctx.fits = len(transposed), gemms.fits(input)
        ctx.save_for_backward(weight, weight_grad_input, decay_mask, *transposed, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "sparse_conv2d is differentiable once: create_graph=True (double backward) is not "
                "supported, because pruned gradients have no second derivative."
            )
        with without_autocast(grad_output.device), dispatch.recording(ctx.record):
            return _gradients(ctx, grad_output)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    weight, weight_grad_input, decay_mask, *rest = ctx.saved_tensors
    packed, inputs = rest[: ctx.packed], rest[ctx.packed :]
    call: Call = ctx.call
    geometry, strategy = call.geometry, call.strategy
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_input = grad_weight = grad_bias = None

    rule = strategy.grad_input
    both = isinstance(rule, WholeGradient) and rule == strategy.grad_weight
    if both and need_weight:
        pruned = _pruned(grad_output, rule, "grad_weight", call)
        dense = pruned is grad_output  # nothing to reuse yet: the very call of a dense layer
        needed = (need_input, True, need_bias and dense)
        grad_input, grad_weight, grad_bias = gradients(
            pruned, inputs[0], weight_grad_input, geometry, needed
        )
        need_bias = need_bias and not dense
        need_input = need_weight = False
    elif need_input and rule is not None and rule.operand == "grad_output":
        pruned = _pruned(grad_output, rule, "grad_input", call)
        grad_input = input_gradient(pruned, weight_grad_input, geometry, ctx.input_shape)
        need_input = False
    elif need_input and packed:
        grad_input = gemms.grad_input(
            grad_output, weight_grad_input, geometry, ctx.input_shape, packed, ctx.fits
        )
        need_input = False
    if need_weight and strategy.grad_weight is None:
        needed = (need_input, True, need_bias)
        dense = gradients(grad_output, inputs[0], weight_grad_input, geometry, needed)
        grad_input = dense[0] if need_input else grad_input
        grad_weight, grad_bias = dense[1:]
    else:
        if need_input:
            grad_input = input_gradient(grad_output, weight_grad_input, geometry, ctx.input_shape)
        if need_weight:
            grad_weight = _grad_weight_pruned(ctx, grad_output, weight_grad_input, inputs)
        if need_bias:
            grad_bias = grad_output.sum((0, 2, 3))

    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
        if decay_mask is not None:
            residual = apply_mask(weight, ~decay_mask)
            grad_weight = grad_weight.add(residual, alpha=call.decay)
    return grad_input, grad_weight, grad_bias, *[None] * (len(ctx.needs_input_grad) - 3)


def _pruned(grad_output: Tensor, rule: Rule, gemm: str, call: Call) -> Tensor:
    groups = call.geometry.groups
    return prune_grad_output(grad_output, rule, gemm, groups, call.generator, call.memory)


def _grad_weight_pruned(
    ctx: Any, grad_output: Tensor, weight: Tensor, inputs: list[Tensor]
) -> Tensor:
    call: Call = ctx.call
    rule, geometry = call.strategy.grad_weight, call.geometry
    if isinstance(rule, Alternating):
        return alternating.grad_weight(
            grad_output,
            inputs,
            weight,
            rule,
            call.phase,
            ctx.kept,
            geometry,
            reduced=ctx.reduced,
        )
    if rule.operand == "grad_output":
        pruned = _pruned(grad_output, rule, "grad_weight", call)
        return gradients(pruned, inputs[0], weight, geometry, (False, True, False))[1]
    kernel = (weight.shape[2], weight.shape[3])
    return grad_weight_pruned_input(grad_output, inputs[0], kernel, geometry, rule, call.generator)


def linear_as_conv(
    input: Tensor, weight: Tensor, convolution: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run (N, ..., in_features) through a 1x1 convolution as (N, in_features, 1, positions)."""
    check_linear(input, weight)
    samples = input.shape[0] if input.dim() > 1 else 1
    positions = input.shape[1:-1].numel() if input.dim() > 1 else 1
    image = input.reshape(samples, 1, positions, input.shape[-1]).permute(0, 3, 1, 2)
    output = convolution(image)
    return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], weight.shape[0])


def convolve_pruned(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pruned: PrunedWeight,
    stride: IntPair,
    padding: IntPair | str,
    dilation: IntPair,
    groups: int,
    strategy: Strategy,
    *,
    decay: float,
    generator: torch.Generator | None = None,
    phase: int | None = None,
    memory: ReuseMemory | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """`sparse_conv2d` with the weight already pruned; see `Call` for the other arguments.

    ``packed``: what `gemms.pack` made of the same weight, if anything.
    """
    input, geometry = padded_geometry(input, weight, stride, padding, dilation, groups)
    dtype = pruned.output.dtype
    input = input.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    if phase is None:
        phase = _draw_phase(strategy, generator)
    call = Call(geometry, strategy, phase, generator, decay, memory)
    return _SparseConv2d.apply(input, weight, bias, *pruned, call, *(packed or ()))


def _draw_phase(strategy: Strategy, generator: torch.Generator | None) -> int:
    rule = strategy.grad_weight
    if not isinstance(rule, Alternating):
        return 0
    if rule.phase != "random":
        return int(rule.phase)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "phase='random' chooses between two programs at each step, which torch.compile cannot "
            "trace; use phase=0 or phase=1."
        )
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2, (), generator=generator, device=device))
