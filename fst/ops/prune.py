"""Rules applied to the operands: which axis of which tensor the groups of M run along."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import triton as ops
from fst.ops.geometry import Geometry
from fst.ops.reuse import ReuseMemory, reuse_grad_output
from fst.rules import masks
from fst.rules.gradient import Reuse, TopK
from fst.rules.nm import NM, SameAsOutput, Transposable
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy
from fst.rules.weight import KernelPatterns, Unstructured


class PrunedWeight(NamedTuple):
    """The weight as each GEMM sees it, and the mask behind S(W) (None where output is dense)."""

    output: Tensor
    grad_input: Tensor
    mask: Tensor | None


class KernelPrunedWeight(PrunedWeight):
    """Made by the kernel, which may write over each of them: nobody else holds the mask."""


def apply_mask(tensor: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """``tensor`` where kept, else 0. Inf and NaN stay visible even where they are dropped."""
    factors = masks.as_integers(mask)
    return tensor * factors if out is None else torch.mul(tensor, factors, out=out)


def weight_mask(
    weight: Tensor, rule: Rule, gemm: str, groups: int, generator: torch.Generator | None = None
) -> Tensor:
    """Mask of ``weight`` (Cout, Cin/groups, kh, kw) for the "output" or "grad_input" GEMM."""
    if isinstance(rule, Unstructured):
        return masks.unstructured_mask(weight, rule.sparsity)
    if isinstance(rule, KernelPatterns):
        scores = weight.square()
        kernels = masks.connectivity_mask(scores, rule.connectivity)
        return masks.pattern_mask(scores, rule.patterns) & kernels
    if isinstance(rule, Transposable):
        grouped = weight.unflatten(0, (groups, -1))
        if rule.group_order == "im2col":
            mask = masks.transposable_mask(grouped.flatten(2), rule.n, rule.m)
            return mask.reshape(weight.shape)
        tiles = grouped.permute(0, 3, 4, 1, 2)
        mask = masks.transposable_mask(tiles, rule.n, rule.m)
        return mask.permute(0, 3, 4, 1, 2).flatten(0, 1)
    if gemm == "grad_input":
        grouped = weight.unflatten(0, (groups, -1))
        return _nm_mask(grouped, rule, 1, generator).flatten(0, 1)
    if rule.group_order == "im2col":
        return _nm_mask(weight.flatten(1), rule, 1, generator).view(weight.shape)
    return _nm_mask(weight, rule, 1, generator)


def _nm_mask(tensor: Tensor, rule: NM, dim: int, generator: torch.Generator | None) -> Tensor:
    kind = "random" if rule.rule == "random" else "magnitude"
    return masks.nm_mask(tensor, rule.n, rule.m, dim, kind, generator)


def prune_weight(
    weight: Tensor,
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
    reuse: PrunedWeight | None = None,
    together: Callable[[], PrunedWeight] | None = None,
) -> PrunedWeight:
    """S(W) and S(Wᵀ) of ``strategy``, selected on ``weight`` as stored and then cast to ``dtype``.

    ``mask`` replaces the mask of the output GEMM (rules that keep a mask for several steps);
    ``reuse`` is an earlier result for the same layer and dtype whose memory is written over;
    ``together`` does what the kernel does for this weight, and for others with it.
    """
    weight = weight.detach()
    rules = (strategy.output, strategy.grad_input)
    if strategy.output is None and not _is_of_weight(strategy.grad_input):
        dense = weight.to(dtype)
        return PrunedWeight(dense, dense, None)
    candidates = {
        "torch": lambda: _prune_with_torch(weight, strategy, groups, dtype, generator, mask, reuse)
    }
    if mask is None and kernel_patterns(strategy) is not None and ops.takes_weight(weight, dtype):
        candidates["triton"] = lambda: _prune_with_kernel(weight, strategy, groups, dtype)
    drawn = any(rule is not None and rule.is_random for rule in rules)
    options = (*map(str, rules), groups, str(dtype))
    backend = dispatch.choose("prune_weight", candidates, (weight,), options, tunable=not drawn)
    if backend == "triton" and together is not None:
        return together()
    return candidates[backend]()


def _is_of_weight(rule: Rule | None) -> bool:
    return rule is not None and rule.operand == "weight"


def kernel_patterns(strategy: Strategy) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(n, m) of S(W) and S(Wᵀ), n = 0 where that is not computed; None where no kernel can."""
    found = []
    for rule in (strategy.output, strategy.grad_input):
        if isinstance(rule, NM) and rule.operand == "weight":
            if rule.rule != "magnitude" or rule.group_order != "channel" or rule.m > ops.MOST_M:
                return None
            found.append((rule.n, rule.m))
        elif not _is_of_weight(rule) or isinstance(rule, SameAsOutput):
            found.append((0, 1))
        else:
            return None
    return (found[0], found[1]) if found[0][0] or found[1][0] else None


def _prune_with_kernel(
    weight: Tensor, strategy: Strategy, groups: int, dtype: torch.dtype
) -> KernelPrunedWeight:
    output, grad_input = kernel_patterns(strategy)
    masked = bool(output[0])
    results = ops.prune_weights([weight], [groups], *output, *grad_input, dtype, masked)
    return _collected([weight], results, strategy, dtype)[0]


def prune_weights_with_kernel(
    weights: list[Tensor],
    groups: list[int],
    strategy: Strategy,
    dtype: torch.dtype,
    reuse: list[PrunedWeight | None],
) -> list[KernelPrunedWeight]:
    """`prune_weight` of many by one call; ``reuse`` as there, as far as the kernel made it."""
    weights = [weight.detach() for weight in weights]
    output, grad_input = kernel_patterns(strategy)
    masked = bool(output[0])
    results = ops.prune_weights(weights, groups, *output, *grad_input, dtype, masked)
    return _collected(weights, results, strategy, dtype)


def _collected(
    weights: list[Tensor], results: list[Tensor], strategy: Strategy, dtype: torch.dtype
) -> list[KernelPrunedWeight]:
    """The results of `ops.prune_weights`, weight by weight."""
    parts = ops.divided(results, len(weights))
    output, grad_input = kernel_patterns(strategy)
    outputs = next(parts) if output[0] else [weight.to(dtype) for weight in weights]
    if grad_input[0]:
        grad_inputs = next(parts)
    elif output[0] and not isinstance(strategy.grad_input, SameAsOutput):
        grad_inputs = [weight.to(dtype) for weight in weights]
    else:
        grad_inputs = outputs
    kept = next(parts, [None] * len(weights))
    return [KernelPrunedWeight(*each) for each in zip(outputs, grad_inputs, kept, strict=True)]


def _prune_with_torch(
    weight: Tensor,
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    mask: Tensor | None,
    reuse: PrunedWeight | None,
) -> PrunedWeight:
    dense = output = weight.to(dtype)
    if strategy.output is not None:
        if mask is None:
            mask = weight_mask(weight, strategy.output, "output", groups, generator)
        output = apply_mask(dense, mask, _buffer(reuse and reuse.output, weight, dtype))
    rule = strategy.grad_input
    if not _is_of_weight(rule):
        grad_input = dense
    elif isinstance(rule, SameAsOutput | Transposable):
        grad_input = output
    else:
        own = weight_mask(weight, rule, "grad_input", groups, generator)
        buffer = _buffer(reuse and reuse.grad_input, weight, dtype, output)
        grad_input = apply_mask(dense, own, buffer)
    return PrunedWeight(output, grad_input, mask)


def _buffer(
    candidate: Tensor | None, weight: Tensor, dtype: torch.dtype, *used: Tensor
) -> Tensor | None:
    """``candidate`` if it can be written over instead of allocating a tensor like ``weight``."""
    if candidate is None or candidate.is_inference() != torch.is_inference_mode_enabled():
        return None
    same_kind = (candidate.shape, candidate.stride(), candidate.dtype, candidate.device) == (
        weight.shape,
        weight.stride(),
        dtype,
        weight.device,
    )
    taken = candidate.data_ptr() in [tensor.data_ptr() for tensor in (weight, *used)]
    return candidate if same_kind and not taken else None


def prune_grad_output(
    grad_output: Tensor,
    rule: Rule,
    gemm: str,
    groups: int,
    generator: torch.Generator | None,
    memory: ReuseMemory | None = None,
) -> Tensor:
    """grad_output (N, Cout, P, Q) pruned for "grad_input" (groups of M along the output channels of
    a convolution group) or "grad_weight" (along the flattened P·Q, as with group_order="position");
    as a whole by `WholeGradient`.
    """
    if isinstance(rule, TopK):
        k = max(1, round(rule.density * grad_output.shape[1:].numel()))
        return apply_mask(grad_output, masks.top_k_mask(grad_output, k))
    if isinstance(rule, Reuse):
        return reuse_grad_output(grad_output, rule, memory)
    along_channels = gemm == "grad_input" and rule.group_order == "channel"
    if not along_channels:
        return _prune_nm(grad_output, rule, along_channels, groups, generator)
    candidates = {"torch": lambda: _prune_nm(grad_output, rule, along_channels, groups, generator)}
    if ops.takes_grad_output(rule.m, rule.rule, rule.rescale, grad_output.dtype):
        candidates["triton"] = lambda: ops.prune_grad_output(
            grad_output,
            rule.n,
            rule.m,
            rule.rule,
            rule.rescale,
            groups,
            dispatch.seed(generator, grad_output.device) if rule.is_random else None,
        )
    options = (rule.n, rule.m, rule.rule, rule.rescale, groups)
    return dispatch.run(
        "prune_grad_output", candidates, (grad_output,), options, tunable=not rule.is_random
    )


def _prune_nm(
    grad_output: Tensor,
    rule: NM,
    along_channels: bool,
    groups: int,
    generator: torch.Generator | None,
) -> Tensor:
    if along_channels:
        view, dim = grad_output.unflatten(1, (groups, grad_output.shape[1] // groups)), 2
    else:
        view, dim = grad_output.flatten(2), 2
    pruned = apply_mask(view, _nm_mask(view, rule, dim, generator))
    if rule.rule == "magnitude_rescaled" and rule.rescale == "group":
        pruned = pruned * masks.l1_scale(view, pruned, "group", rule.m, dim)
    pruned = pruned.flatten(1, 2) if along_channels else pruned.unflatten(2, grad_output.shape[2:])
    if rule.rule == "magnitude_rescaled" and rule.rescale != "group":
        pruned = pruned * masks.l1_scale(grad_output, pruned, rule.rescale, rule.m, 1)
    return pruned


def grad_weight_pruned_input(
    grad_output: Tensor,
    input: Tensor,
    kernel: tuple[int, int],
    geometry: Geometry,
    rule: NM,
    generator: torch.Generator | None,
) -> Tensor:
    """dW = dY · S(Xᵀ), with groups of M output positions for each row of im2col(X) and sample.

    Sorting needs im2col(X) itself: kh·kw times the memory of the input.
    """
    stride, padding, dilation, groups = geometry
    channels = grad_output.shape[1]
    columns = F.unfold(input, kernel, dilation, padding, stride)
    columns = apply_mask(columns, _nm_mask(columns, rule, 2, generator))
    columns = columns.unflatten(1, (groups, columns.shape[1] // groups))
    rows = grad_output.flatten(2).unflatten(1, (groups, channels // groups))
    product = torch.einsum("ngol,ngkl->gok", rows, columns)
    return product.reshape(channels, input.shape[1] // groups, *kernel)
