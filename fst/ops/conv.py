"""The one autograd op: a convolution of which each GEMM's operands may be pruned."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fst.backends import choice, registry
from fst.backends.choice import DENSE
from fst.backends.record import Record
from fst.basics.autocast import autocast_dtype, without_autocast
from fst.basics.errors import UsageError
from fst.ops.arguments import UNTRACEABLE, check_linear
from fst.ops.geometry import Geometry, convolve, convolve_by_torch, gradients
from fst.ops.operands import GradInput, GradWeight, Output, Zeros
from fst.ops.positions.lists import Lists
from fst.ops.prune import PrunedWeight, add_residual, prune_grad_output
from fst.ops.zeros import may_count, share_of_zeros, zeros_of_output
from fst.rules.rule import Rule
from fst.rules.sampled import samples
from fst.rules.strategy import Strategy


class KnownCall(NamedTuple):
    """The knowledge that a layer has of a call before it is computed.

    Attributes:
        key: the shapes and types that decide, for one layer and strategy, the fastest backends;
            None where no call may leave the choice out.
        is_dense: True where the dense backend is known to be chosen for each product.
    """

    key: Hashable | None = None
    is_dense: bool = False


NOTHING = KnownCall()


class Call(NamedTuple):
    """The arguments of one call of the op besides its tensors.

    Attributes:
        decay: λ of the term λ(W − S(W)) that this call adds to grad_weight.
        generator: source of randomness of random rules on grad_output and input.
        seed: decides which positions are kept, in the place of ``generator``.
        memory: a rule of grad_output keeps here what its next backward pass needs.
        trains: False for a call that is no part of a training step.
    """

    geometry: Geometry
    strategy: Strategy
    decay: float = 0.0
    generator: torch.Generator | None = None
    seed: int | None = None
    memory: dict[str, Any] | None = None
    trains: bool = True
    known: KnownCall = NOTHING

    @property
    def counts_zeros(self) -> bool:
        """True where shares of zeros may decide between backends."""
        return not self.known.is_dense and may_count(self.strategy)


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
        if call.known.is_dense:
            output = convolve(input, weight_output, bias, call.geometry)
            ctx.zeros, ctx.ran = Zeros(), DENSE
        else:
            zeros = zeros_of_output(call.strategy, input, weight_output, trains=call.trains)
            of_output = Output(input, weight_output, bias, call.geometry, zeros)
            backend = choice.choose(of_output)
            output = backend.run(of_output)
            ctx.zeros, ctx.ran = zeros, backend.name
        # S(Wᵀ) has zeros of its own, unless both directions multiply with one tensor.
        if weight_grad_input is not weight_output and call.counts_zeros:
            share = share_of_zeros("transposed", weight_grad_input, trains=call.trains)
            ctx.zeros = zeros._replace(weight=share)
        ctx.call, ctx.phase, ctx.input_shape = call, phase, input.shape
        ctx.record = choice.current_record()
        decay_mask = mask if call.decay else None
        saved = input if derives_weight else None
        # Kept outside save_for_backward: activation checkpointing would replace it by a new draw.
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
        with without_autocast(grad_output.device):
            return *_gradients(ctx, grad_output), *[None] * (len(ctx.needs_input_grad) - 3)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_input, grad_weight and grad_bias, as far as they are needed."""
    call: Call = ctx.call
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    weight, weight_grad_input, decay_mask, input = ctx.saved_tensors
    with choice.recording(ctx.record, is_dense=call.known.is_dense):
        if call.known.is_dense and need_weight and not registry.demands():
            products = _dense_products(ctx, grad_output, input, weight_grad_input)
        else:
            products = _products(ctx, grad_output, input, weight_grad_input)
    grad_input, grad_weight, grad_bias = products
    if need_bias and grad_bias is None:
        grad_bias = grad_output.sum((0, 2, 3))
    if grad_weight is not None:
        if grad_weight.dtype != weight.dtype:
            grad_weight = grad_weight.to(weight.dtype)
        if decay_mask is not None:
            add_residual(grad_weight, weight, decay_mask, call.decay)
    return grad_input, grad_weight, grad_bias


def _dense_products(
    ctx: Any, grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`_products` where all of them are known to be the library's."""
    need_input, _, need_bias = ctx.needs_input_grad[:3]
    geometry, rule = ctx.call.geometry, ctx.call.strategy.grad_weight
    dy_input, dy_weight = _pruned_twice(grad_output, ctx.call, need_input, True)
    bias = need_bias and dy_weight is grad_output and not samples(rule)
    if not need_input or dy_input is dy_weight:
        return gradients(dy_weight, input, weight, geometry, (need_input, True, bias))
    _, grad_weight, grad_bias = gradients(dy_weight, input, weight, geometry, (False, True, bias))
    grad_input = gradients(dy_input, input, weight, geometry, (True, False, False))[0]
    return grad_input, grad_weight, grad_bias


def _products(
    ctx: Any, grad_output: Tensor, input: Tensor | None, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by the backends that are chosen; of the bias only where it costs nothing.

    Args:
        weight: as grad_input multiplies with it.
    """
    call: Call = ctx.call
    strategy, geometry = call.strategy, call.geometry
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_input = grad_weight = grad_bias = None
    ran = {ctx.ran}  # the backends of all products

    # The operands: dY as each of the two GEMMs multiplies with it, and lists of drawn positions.
    rules = _rules_of_products(strategy, grad_output)
    dy_input, dy_weight = _pruned_twice(grad_output, call, need_input, need_weight)
    zeros = ctx.zeros
    of_dy_input = of_dy_weight = zeros
    # One count serves both products where they see one dY: to count reads it.
    if call.counts_zeros:
        of_dy_input = zeros._replace(
            grad_output=share_of_zeros("grad_output", dy_input, trains=call.trains)
        )
        of_dy_weight = of_dy_input
        if dy_weight is not dy_input:
            share = share_of_zeros("dY of grad_weight", dy_weight, trains=call.trains)
            of_dy_weight = zeros._replace(grad_output=share)
    lists = None
    if ctx.start is not None and grad_output.numel():
        size, kernel = ctx.input_shape[2:], weight.shape[2:]
        sizes = (size[0], size[1]), (kernel[0], kernel[1])
        of_maps, center = (grad_output, input), rules[1] is not None and _centers(rules[1])
        lists = Lists(*of_maps, *sizes, geometry, ctx.start, with_sums=center)

    # The GEMMs: where dX draws nothing, its backend is chosen first, as the library computes both
    # gradients by one call; where it draws, dW comes first, whose list then serves dX too.
    of_input = GradInput(
        *(dy_input, weight, geometry, ctx.input_shape, input, rules[0]),
        None if rules[0] is None else lists,
        of_dy_input,
    )
    backend = choice.choose(of_input) if need_input and of_input.lists is None else None
    if need_weight:
        assert input is not None  # saved where the weight's gradient is needed
        same = not need_input or dy_input is dy_weight
        of_weight = GradWeight(
            *(dy_weight, input, weight, geometry, rules[1], ctx.phase, call.generator),
            lists if samples(rules[1]) else None,
            joint=same and backend is not None and backend.name == DENSE,
            bias=same and need_bias and dy_weight is grad_output and not samples(rules[1]),
            zeros=of_dy_weight,
        )
        chosen = choice.choose(of_weight)
        grad_input, grad_weight, grad_bias = chosen.run(of_weight)
        ran.add(chosen.name)
    if need_input and grad_input is None:
        if of_input.lists is not None and not of_input.lists.is_drawn:
            of_input = of_input._replace(lists=of_input.lists.fresh(with_sums=False))
        backend = backend or choice.choose(of_input)
        grad_input = backend.run(of_input)
        ran.add(backend.name)

    # Remember where no product leaves anything out.
    key, is_known = call.known
    if key is not None and call.trains and not is_known and need_weight and ran == {DENSE}:
        ctx.record.found_dense.add(key)
    return grad_input, grad_weight, grad_bias


def _rules_of_products(strategy: Strategy, grad_output: Tensor) -> tuple[Rule | None, Rule | None]:
    """The rules by which grad_input and grad_weight leave positions out; of an empty batch none."""
    rule, other = strategy.grad_weight, strategy.grad_input
    if rule is not None and rule.operand != "input" and not (rule.samples and grad_output.numel()):
        rule = None
    return other if other is not None and other.samples and grad_output.numel() else None, rule


def _centers(rule: Rule) -> bool:
    return samples(rule) and rule.center


def _pruned_twice(
    grad_output: Tensor, call: Call, need_input: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """grad_output as grad_input and as grad_weight multiply with it, where they are needed."""

    def pruned(rule: Rule | None, gemm: str) -> Tensor:
        if rule is None or rule.operand != "grad_output" or rule.samples:
            return grad_output
        groups = call.geometry.groups
        return prune_grad_output(grad_output, rule, gemm, groups, call.generator, call.memory)

    of_input, of_weight = call.strategy.grad_input, call.strategy.grad_weight
    dy_input = pruned(of_input, "grad_input") if need_input else grad_output
    if need_input and of_weight is not None and of_weight.is_whole and of_weight == of_input:
        return dy_input, dy_input
    return dy_input, pruned(of_weight, "grad_weight") if need_weight else grad_output


def known_call(input: Tensor, weight: Tensor | None, record: Record) -> KnownCall:
    """The knowledge that a layer's record has of a call with these operands.

    Nothing of an unchecked input, of a weight that its layer computes, inside transforms of
    torch.func, and where backends are asked for.
    """
    if type(input) is not Tensor or type(weight) is not Parameter:
        return NOTHING
    if torch._C._are_functorch_transforms_active() or registry.demands():
        return NOTHING
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    device = input.device
    types = _types(device, input.dtype, weight.dtype, autocast_dtype(device))
    key = tuple(input.shape), types, last, torch.is_grad_enabled()
    return KnownCall(key, key in record.dense_calls)


@functools.cache
def _types(device: torch.device, *dtypes: torch.dtype | None) -> str:
    """Types of a call as a checkpoint may keep them."""
    return " ".join(map(str, (device.type, *dtypes)))


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


def _is_plain(pruned: PrunedWeight, call: Call) -> bool:
    """True if the call is a plain convolution with S(W): PyTorch's node then costs less."""
    is_dense = call.known.is_dense and not call.decay and not registry.demands()
    return is_dense and call.strategy.prunes_weights_alone and pruned.output is pruned.grad_input


def _with_values(weight: Tensor, values: Tensor) -> Tensor:
    """Return a tensor of these values whose gradient is the weight's: straight through.

    Nothing is copied, and a weight that is written to before the backward pass is an error, as in
    PyTorch.
    """
    passed = weight.view_as(weight) if weight.dtype == values.dtype else weight.to(values.dtype)
    passed.data = values
    return passed


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
    if _is_plain(pruned, call):
        return convolve_by_torch(input, _with_values(weight, pruned.output), bias, call.geometry)
    start, phase, rule = None, 0, call.strategy.grad_weight
    derives = torch.is_grad_enabled()
    if derives:
        drawn = call.generator, call.seed
        phase = 0 if rule is None else rule.draw_phase(*drawn)
        sampling = None if call.known.is_dense else call.strategy.sampling
        start = None if sampling is None else sampling.draw_start(*drawn, input.device)
    derives_weight = weight.requires_grad and derives
    return _SparseConv2d.apply(input, weight, bias, *pruned, start, phase, derives_weight, call)
