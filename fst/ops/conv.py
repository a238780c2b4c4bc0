"""The one autograd op: a convolution of which each GEMM's operands may be pruned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import dispatch
from fst.basics.autocast import without_autocast
from fst.basics.errors import UsageError
from fst.ops import gemms, positions
from fst.ops.arguments import UNTRACEABLE, IntPair, check_linear, padded_geometry
from fst.ops.geometry import Geometry, gradients
from fst.ops.prune import PrunedWeight, prune_grad_output, residual
from fst.ops.sparse24 import PackedWeight
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy


class Call(NamedTuple):
    """What one call of the op needs besides its tensors.

    Attributes:
        phase: which positions a rule of the input keeps in this call.
        generator: source of randomness of random rules on grad_output and input.
        derives_weight: whether there will be a grad_weight.
        decay: λ of the term λ(W − S(W)) that this call adds to it.
        memory: what a rule of grad_output leaves from one backward pass to the next.
    """

    geometry: Geometry
    strategy: Strategy
    phase: int
    generator: torch.Generator | None
    derives_weight: bool
    decay: float
    memory: dict[str, Any] | None


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
        geometry, strategy = call.geometry, call.strategy
        output = gemms.output(input, weight_output, bias, geometry, strategy, packed)
        kept, inputs, rule = None, [], strategy.grad_weight
        if call.derives_weight:
            inputs, size = [input], (output.shape[2], output.shape[3])
            if rule is not None and rule.leaves_dense(*size):
                rule = None
                dispatch.note("grad_weight", "dense", f"the output map is {size[0]}x{size[1]}")
            if rule is not None:
                kept, inputs = positions.keep(rule, call.phase, input, weight, size, geometry)
        transposed = gemms.for_grad_input(strategy, packed)
        ctx.call, ctx.kept, ctx.rule = call, kept, rule
        ctx.record = dispatch.current_record()
        ctx.input_shape, ctx.readable = input.shape, gemms.is_readable(input)
        ctx.packed = len(transposed)
        decay_mask = mask if call.decay else None
        ctx.save_for_backward(weight, weight_grad_input, decay_mask, *transposed, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "sparse_conv2d is differentiable once: create_graph=True (double backward) is not "
                "supported, because pruned gradients have no second derivative."
            )
        with without_autocast(grad_output.device), dispatch.recording(ctx.record):
            return _gradients(ctx, grad_output)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    weight, weight_grad_input, decay_mask, *rest = ctx.saved_tensors
    packed, inputs = rest[: ctx.packed], rest[ctx.packed :]
    call: Call = ctx.call
    geometry = call.geometry
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_input = grad_weight = grad_bias = None

    dy_input, dy_weight = _pruned_twice(grad_output, call, need_input, need_weight)
    by_library = ctx.kept is None and _is_dense_or_pruned_dy(ctx.rule)
    if need_input and need_weight and dy_input is dy_weight and by_library and not packed:
        needed = (True, True, need_bias and dy_weight is grad_output)
        grad_input, grad_weight, grad_bias = gradients(
            dy_weight, inputs[0], weight_grad_input, geometry, needed
        )
    else:
        if need_input:
            whole = inputs[0] if inputs and not (ctx.kept and ctx.kept.reduced) else None
            grad_input = gemms.grad_input(
                dy_input, weight_grad_input, geometry, ctx.input_shape, packed, ctx.readable, whole
            )
        if need_weight:
            grad_weight, grad_bias = gemms.grad_weight(
                dy_weight,
                inputs,
                weight_grad_input,
                geometry,
                ctx.rule,
                ctx.kept,
                call.generator,
                with_bias=need_bias and dy_weight is grad_output,
            )
    if need_bias and grad_bias is None:
        grad_bias = grad_output.sum((0, 2, 3))

    if grad_weight is not None:
        if grad_weight.dtype != weight.dtype:
            grad_weight = grad_weight.to(weight.dtype)
        if decay_mask is not None:
            grad_weight = grad_weight.add(residual(weight, decay_mask), alpha=call.decay)
    return grad_input, grad_weight, grad_bias, *[None] * (len(ctx.needs_input_grad) - 3)


def _is_dense_or_pruned_dy(rule: Rule | None) -> bool:
    return rule is None or rule.operand == "grad_output"


def _pruned_twice(
    grad_output: Tensor, call: Call, need_input: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """grad_output as grad_input and as grad_weight multiply with it, where they are needed."""

    def pruned(gemm: str) -> Tensor:
        rule = call.strategy.rule(gemm)
        if rule is None or rule.operand != "grad_output":
            return grad_output
        groups = call.geometry.groups
        return prune_grad_output(grad_output, rule, gemm, groups, call.generator, call.memory)

    dy_input = pruned("grad_input") if need_input else grad_output
    rule = call.strategy.grad_weight
    if need_input and rule is not None and rule.is_whole and rule == call.strategy.grad_input:
        return dy_input, dy_input
    return dy_input, pruned("grad_weight") if need_weight else grad_output


def linear_as_conv(
    input: Tensor, weight: Tensor, convolution: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run (..., in_features) through a 1x1 convolution as (N, in_features, height, width).

    (N, C) has one position for each sample, (N, T, C) a row of tokens, (..., H, W, C) maps.
    """
    check_linear(input, weight)
    *samples, height, width = as_maps(input.shape[:-1])
    count = math.prod(samples)
    if not height * width:  # nothing to compute, as in an empty batch
        count, height, width = 0, 1, 1
    image = input.reshape(count, height, width, input.shape[-1]).permute(0, 3, 1, 2)
    output = convolution(image)
    return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], weight.shape[0])


def as_maps(shape: torch.Size) -> tuple[int, ...]:
    """(..., height, width) of what stands before the features."""
    if len(shape) < 2:
        return (*shape, 1, 1) if shape else (1, 1, 1)
    return (*shape[:-1], 1, shape[-1]) if len(shape) == 2 else tuple(shape)


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
    decay: float = 0.0,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    memory: dict[str, Any] | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """`sparse_conv2d` with the weight already pruned; see `Call` for the other arguments.

    Args:
        seed: what decides the phase of a random rule; by ``generator`` if None.
        packed: what `gemms.pack` made of the same weight, if anything.
    """
    input, geometry = padded_geometry(input, weight, stride, padding, dilation, groups)
    dtype = pruned.output.dtype
    if input.dtype != dtype:
        input = input.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    rule = strategy.grad_weight
    if torch.is_grad_enabled() and torch.jit.is_tracing():
        raise UsageError(UNTRACEABLE)
    phase = 0 if rule is None else rule.draw_phase(generator, seed)
    derives_weight = weight.requires_grad and torch.is_grad_enabled()
    call = Call(geometry, strategy, phase, generator, derives_weight, decay, memory)
    return _SparseConv2d.apply(input, weight, bias, *pruned, call, *(packed or ()))
