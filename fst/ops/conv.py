"""The one autograd op: a convolution of which each GEMM's operands may be pruned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fst.backends import dispatch, registry
from fst.basics.autocast import autocast_dtype, without_autocast
from fst.basics.errors import UsageError
from fst.ops import gemms
from fst.ops.arguments import UNTRACEABLE, check_linear
from fst.ops.geometry import Geometry, convolve, gradients
from fst.ops.positions import sampled
from fst.ops.prune import PrunedWeight, prune_grad_output, residual
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy

ExactKey = tuple[Any, ...]


class Call(NamedTuple):
    """What one call of the op needs besides its tensors.

    Attributes:
        decay: λ of the term λ(W − S(W)) that this call adds to grad_weight.
        generator: source of randomness of random rules on grad_output and input.
        seed: decides which positions are kept, in the place of ``generator``.
        memory: a rule of grad_output keeps here what its next backward pass needs.
        exact: gets ``key`` where the exact backward pass was measured to be faster.
        key: names the shapes and types of the call, see `exact_key`.
    """

    geometry: Geometry
    strategy: Strategy
    decay: float = 0.0
    generator: torch.Generator | None = None
    seed: int | None = None
    memory: dict[str, Any] | None = None
    exact: set[ExactKey] | None = None
    key: ExactKey = ()


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
        start: Tensor | None,
        phase: int,
        derives_weight: bool,
        call: Call,
    ) -> Tensor:
        output = convolve(input, weight_output, bias, call.geometry)
        ctx.call, ctx.phase, ctx.input_shape = call, phase, input.shape
        ctx.record = dispatch.current_record()
        decay_mask = mask if call.decay else None
        saved = input if derives_weight else None
        # Not saved as the others are: a recomputation of activations draws another one.
        ctx.start = start
        ctx.save_for_backward(weight, weight_grad_input, decay_mask, saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "sparse_conv2d is differentiable once: create_graph=True (double backward) is not "
                "supported, because pruned gradients have no second derivative."
            )
        with without_autocast(grad_output.device), dispatch.recording(ctx.record):
            return *_gradients(ctx, grad_output), *[None] * (len(ctx.needs_input_grad) - 3)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_input, grad_weight and grad_bias, as far as they are needed."""
    call: Call = ctx.call
    strategy, geometry = call.strategy, call.geometry
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    weight, weight_grad_input, decay_mask, input = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = lists = None

    # The operands: dY as each of the two GEMMs multiplies with it.
    rule = _rule_of_grad_weight(strategy, grad_output)
    dy_input, dy_weight = _pruned_twice(grad_output, call, rule, need_input, need_weight)

    # The GEMMs: both by one call of the library where it can, else grad_weight first, whose list
    # of positions may serve grad_input too.
    shared = not need_input or dy_input is dy_weight
    if need_weight and shared and _by_library(strategy, rule):
        needed = (need_input, True, need_bias and dy_weight is grad_output)
        operands = (dy_weight, input, weight_grad_input, geometry)
        grad_input, grad_weight, grad_bias = gradients(*operands, needed)
    else:
        joint = need_input and dy_input is grad_output and _by_library(strategy, None)
        operands = (grad_output, input, ctx.input_shape, weight_grad_input, geometry)
        step = sampled.Step(*operands, ctx.start, joint)
        if need_weight:
            grad_input, grad_weight, lists = gemms.grad_weight(
                dy_weight, step, rule, ctx.phase, call.generator
            )
        if need_input and grad_input is None:
            grad_input = gemms.grad_input(dy_input, step, strategy.grad_input, lists)
    if need_bias and grad_bias is None:
        grad_bias = grad_output.sum((0, 2, 3))

    # What is added to dW, and what this step has told of the times.
    if grad_weight is not None:
        if grad_weight.dtype != weight.dtype:
            grad_weight = grad_weight.to(weight.dtype)
        if decay_mask is not None:
            grad_weight = grad_weight.add(residual(weight, decay_mask), alpha=call.decay)
    if call.exact is not None and sampled.was_exact(ctx.record, strategy, need_input, need_weight):
        call.exact.add(call.key)
    return grad_input, grad_weight, grad_bias


def _rule_of_grad_weight(strategy: Strategy, grad_output: Tensor) -> Rule | None:
    """The rule of grad_weight; None where it leaves such an output map as it is."""
    rule, (height, width) = strategy.grad_weight, grad_output.shape[2:]
    if rule is None or not rule.leaves_dense(height, width):
        return rule
    dispatch.note("grad_weight", sampled.EXACT, f"the output map is {height}x{width}")
    return None


def _by_library(strategy: Strategy, rule: Rule | None) -> bool:
    """Whether dense arithmetic on these operands gives both gradients."""
    if rule is not None and (rule.samples or rule.operand != "grad_output"):
        return False
    other = strategy.grad_input
    return other is None or not other.samples


def _pruned_twice(
    grad_output: Tensor, call: Call, rule: Rule | None, need_input: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """grad_output as grad_input and as grad_weight multiply with it, where they are needed."""

    def pruned(rule: Rule | None, gemm: str) -> Tensor:
        if rule is None or rule.operand != "grad_output" or rule.samples:
            return grad_output
        groups = call.geometry.groups
        return prune_grad_output(grad_output, rule, gemm, groups, call.generator, call.memory)

    of_input = call.strategy.grad_input
    dy_input = pruned(of_input, "grad_input") if need_input else grad_output
    if need_input and rule is not None and rule.is_whole and rule == of_input:
        return dy_input, dy_input
    return dy_input, pruned(rule, "grad_weight") if need_weight else grad_output


def exact_key(input: Tensor, weight: Tensor | None) -> ExactKey | None:
    """What decides, for one layer and one strategy, whether sampling is faster.

    None where a layer must not run as the dense one: an unchecked input, a weight that its layer
    computes, transforms of torch.func.
    """
    if type(input) is not Tensor or type(weight) is not Parameter:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    dtypes = input.dtype, weight.dtype, autocast_dtype(input.device)
    return input.shape, dtypes, last, torch.is_grad_enabled(), registry.demands()


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
    input: Tensor, weight: Tensor, bias: Tensor | None, pruned: PrunedWeight, call: Call
) -> Tensor:
    """`sparse_conv2d` with the weight already pruned, and the geometry already checked."""
    dtype = pruned.output.dtype
    if input.dtype != dtype:
        input = input.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if torch.is_grad_enabled() and torch.jit.is_tracing():
        raise UsageError(UNTRACEABLE)
    start, phase, rule = None, 0, call.strategy.grad_weight
    derives = torch.is_grad_enabled()
    if derives:
        drawn = call.generator, call.seed
        phase = 0 if rule is None else rule.draw_phase(*drawn)
        sampling = call.strategy.sampling
        start = None if sampling is None else sampling.draw_start(*drawn, input.device)
    derives_weight = weight.requires_grad and derives
    return _SparseConv2d.apply(input, weight, bias, *pruned, start, phase, derives_weight, call)
