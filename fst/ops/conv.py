"""The one autograd op: a convolution that may prune the operands of each of its three GEMMs.

    forward    S(W), S(Wᵀ) by the layer; then  Y = S(W)·X
    backward   dY pruned; then  dX = S(Wᵀ)·dY  and  dW = dY·Xᵀ

How each of them is computed is the business of the call's `CallPlan`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fst.basics.autocast import autocast_dtype, is_autocast
from fst.basics.errors import UsageError
from fst.ops.arguments import check_linear
from fst.ops.plan import NOTHING_DRAWN, CallPlan, Draws, Found
from fst.ops.prune import PrunedWeight, add_residual
from fst.rules.strategy import Strategy

_GRADIENTS = torch.ops.aten.convolution_backward.default


class Call(NamedTuple):
    """The arguments of one call of the op that are no tensors of autograd.

    Attributes:
        pruned: the weight as the GEMMs multiply with it.
        decay: λ of the term λ(W − S(W)) that this call adds to grad_weight.
        counts: whether zeros are counted.
        step: of the layer.
    """

    plan: CallPlan
    pruned: PrunedWeight
    draws: Draws
    decay: float
    counts: bool
    step: int


class _SparseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        plan, (multiplied, transposed, mask) = call.plan, call.pruned
        if call.counts:
            plan.count("input", input)
            plan.count("weight", multiplied)
            if transposed is not multiplied:
                plan.count("transposed", transposed)
        output = plan.output(input, multiplied, bias)
        ctx.call, ctx.input_shape = call, input.shape
        saved = input if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weight, transposed, saved, mask if call.decay else None)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(input)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if is_autocast() and autocast_dtype(grad_output.device):  # tensors keep their dtype
            with torch.autocast(grad_output.device.type, enabled=False):
                return _SparseConv2d.backward(ctx, grad_output)
        call: Call = ctx.call
        weight, transposed, input, mask = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *_differentiable_gradients(ctx, grad_output), None
        grad_input, grad_weight, grad_bias = call.plan.gradients(
            *(grad_output, input, transposed, ctx.input_shape, needed, call.draws),
            own_transposed=transposed is not call.pruned.output,
            counts=call.counts,
            step=call.step,
        )
        if grad_weight is not None:
            if grad_weight.dtype != weight.dtype:
                grad_weight = grad_weight.to(weight.dtype)
            if mask is not None:
                add_residual(grad_weight, weight, mask, call.decay)
        return grad_input, grad_weight, grad_bias, None


class _WithTangents(_SparseConv2d):
    """The op in forward-mode differentiation; torch.compile takes no op that has a jvp."""

    @staticmethod
    def jvp(
        ctx: Any, input: Tensor | None, weight: Tensor | None, bias: Tensor | None, _: None
    ) -> Tensor:
        """Y' = S(W)·X' + W'·X + b', the arguments being tangents: straight through the pruning."""
        plan, multiplied = ctx.call.plan, ctx.call.pruned.output
        refuse_derivatives(plan.strategy, "forward-mode differentiation")
        (primal,) = ctx.saved_tensors
        zero = torch.zeros_like(primal) if input is None else input
        tangent = F.conv2d(zero, multiplied, bias, *plan.geometry)
        if weight is not None:
            tangent = tangent + F.conv2d(primal, weight.to(plan.dtype), None, *plan.geometry)
        return tangent


def refuse_derivatives(strategy: Strategy, what: str) -> None:
    """Raise RuntimeError unless the strategy prunes weights alone."""
    if not strategy.prunes_only_weights:
        raise UsageError(
            f"{what} is not supported under strategy {strategy.name!r}: the gradients that it "
            "prunes have no derivative. Strategies that prune weights alone support it."
        )


def refuse_double_backward(strategy: Strategy) -> None:
    """Raise RuntimeError unless gradients have derivatives."""
    refuse_derivatives(strategy, "create_graph=True (double backward)")


def _differentiable_gradients(ctx: Any, grad_output: Tensor) -> Found:
    """The gradients as a graph of PyTorch's operators: straight through the pruning."""
    call: Call = ctx.call
    refuse_double_backward(call.plan.strategy)
    weight, transposed, input, mask = ctx.saved_tensors
    geometry = call.plan.geometry
    if input is None:  # only its shape counts
        input = grad_output.new_zeros(ctx.input_shape)
    grad_input, grad_weight, grad_bias = _GRADIENTS(
        *(grad_output, input, with_values(weight, transposed), (weight.shape[0],)),
        *(geometry.stride, geometry.padding, geometry.dilation, False, (0, 0), geometry.groups),
        ctx.needs_input_grad[:3],
    )
    if grad_weight is not None and mask is not None:
        grad_weight = grad_weight.to(weight.dtype) + call.decay * weight.masked_fill(mask, 0)
    return grad_input, grad_weight, grad_bias


def with_values(weight: Tensor, values: Tensor) -> Tensor:
    """Return a tensor of these values whose gradient is the weight's: straight through.

    Nothing is copied, and a weight that is written to before the backward pass is an error, as in
    PyTorch.
    """
    passed = weight.view_as(weight) if weight.dtype == values.dtype else weight.to(values.dtype)
    passed.data = values
    return passed


def convolve_pruned(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: CallPlan,
    pruned: PrunedWeight,
    draws: Draws = NOTHING_DRAWN,
    decay: float = 0.0,
    *,
    counts: bool = False,
    step: int = 0,
    is_dense: bool = False,
) -> Tensor:
    """`sparse_conv2d` with the weight already pruned, and the geometry already checked.

    Args:
        draws, decay, counts, step: see `Call`.
        is_dense: whether all products are known to be dense.
    """
    dtype = plan.dtype
    if input.dtype != dtype:
        input = input.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if forward_ad._current_level >= 0:
        call = Call(plan, pruned, draws, decay, counts, step)
        return _WithTangents.apply(input, weight, bias, call)
    if not torch.is_grad_enabled():
        return plan.output(input, pruned.output, bias)
    if is_dense and not decay and plan.strategy.multiplies_one_weight:
        return plan.dense_output(input, with_values(weight, pruned.output), bias)
    call = Call(plan, pruned, draws, decay, counts, step)
    return _SparseConv2d.apply(input, weight, bias, call)


def images_of_rows(input: Tensor, weight: Tensor) -> Tensor:
    """(..., in_features) as (N, in_features, height, width), for a 1x1 convolution.

    (N, C) has one position for each sample, (N, T, C) a row of tokens, (..., H, W, C) maps.
    """
    check_linear(input, weight)
    *samples, height, width = as_maps(input.shape[:-1])
    count = math.prod(samples)
    if not height * width:  # nothing to compute, as in an empty batch
        count, height, width = 0, 1, 1
    return input.reshape(count, height, width, input.shape[-1]).permute(0, 3, 1, 2)


def rows_of_images(output: Tensor, input: Tensor) -> Tensor:
    """(N, out_features, height, width) as (..., out_features), by the input of `images_of_rows`."""
    return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], output.shape[1])


def as_maps(shape: torch.Size) -> tuple[int, ...]:
    """(..., height, width) of what stands before the features."""
    if len(shape) < 2:
        return (*shape, 1, 1) if shape else (1, 1, 1)
    return (*shape[:-1], 1, shape[-1]) if len(shape) == 2 else tuple(shape)
