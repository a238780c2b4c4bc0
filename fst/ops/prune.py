"""Rules applied to the operands: which axis of which tensor the groups of M run along."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst import masks
from fst.backends import dispatch, ops
from fst.ops.geometry import Geometry
from fst.ops.reuse import ReuseMemory, reuse_grad_output
from fst.rules_gradient import Reuse, TopK
from fst.rules_weight import KernelPatterns, Unstructured
from fst.strategy import NM, Rule, SameAsOutput, Strategy, Transposable


class PrunedWeight(NamedTuple):
    """The weight as each GEMM sees it, and the mask behind S(W) (None where output is dense)."""

    output: Tensor
    grad_input: Tensor
    mask: Tensor | None


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
) -> PrunedWeight:
    """S(W) and S(Wᵀ) of ``strategy``, selected on ``weight`` as stored and then cast to ``dtype``.

    ``mask`` replaces the mask of the output GEMM (rules that keep a mask for several steps);
    ``reuse`` is an earlier result for the same layer and dtype whose memory is written over.
    """
    weight = weight.detach()
    rule = strategy.grad_input
    if strategy.output is None and (rule is None or rule.operand != "weight"):
        dense = weight.to(dtype)
        return PrunedWeight(dense, dense, None)
    candidates = {
        "torch": lambda: _prune_weight(weight, strategy, groups, dtype, generator, mask, reuse)
    }
    patterns = _kernel_patterns(weight, strategy, dtype) if mask is None else None
    if patterns is not None:
        candidates["triton"] = lambda: _prune_with_kernel(weight, patterns, strategy, groups, dtype)
    options = (str(strategy.output), str(strategy.grad_input), groups, str(dtype))
    drawn = any(
        rule is not None and rule.is_random for rule in (strategy.output, strategy.grad_input)
    )
    return dispatch.run("prune_weight", candidates, (weight,), options, tunable=not drawn)


def _kernel_patterns(
    weight: Tensor, strategy: Strategy, dtype: torch.dtype
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(n, m) of S(W) and S(Wᵀ), n = 0 where that is not computed; None where no kernel can."""
    if not ops.takes_weight(weight, dtype):
        return None
    found = []
    for rule in (strategy.output, strategy.grad_input):
        if isinstance(rule, NM) and rule.operand == "weight":
            if rule.rule != "magnitude" or rule.group_order != "channel":
                return None
            found.append((rule.n, rule.m))
        elif rule is None or rule.operand != "weight" or isinstance(rule, SameAsOutput):
            found.append((0, 1))
        else:
            return None
    return (found[0], found[1]) if found[0][0] or found[1][0] else None


def _prune_with_kernel(
    weight: Tensor,
    patterns: tuple[tuple[int, int], tuple[int, int]],
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
) -> PrunedWeight:
    output, grad_input = patterns
    masked = bool(output[0])
    results = ops.prune_weights([weight], [groups], *output, *grad_input, dtype, masked)
    dense = None if output[0] and grad_input[0] else weight.to(dtype)
    pruned = results[0] if masked else dense
    if grad_input[0]:
        transposed = results[1] if masked else results[0]
    else:
        transposed = pruned if isinstance(strategy.grad_input, SameAsOutput) else dense
    return PrunedWeight(pruned, transposed, results[-1] if masked else None)


def _prune_weight(
    weight: Tensor,
    strategy: Strategy,
    groups: int,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    mask: Tensor | None,
    reuse: PrunedWeight | None,
) -> PrunedWeight:
    dense = weight.to(dtype)
    output = dense
    if strategy.output is not None:
        if mask is None:
            mask = weight_mask(weight, strategy.output, "output", groups, generator)
        output = apply_mask(dense, mask, _buffer(reuse and reuse.output, dense, weight))
    rule = strategy.grad_input
    if rule is None or rule.operand != "weight":
        grad_input = dense
    elif isinstance(rule, SameAsOutput | Transposable):
        grad_input = output
    else:
        own = weight_mask(weight, rule, "grad_input", groups, generator)
        grad_input = apply_mask(dense, own, _buffer(reuse and reuse.grad_input, dense, weight))
    return PrunedWeight(output, grad_input, mask)


def _buffer(candidate: Tensor | None, like: Tensor, weight: Tensor) -> Tensor | None:
    """``candidate`` if it can be written over instead of allocating a tensor like ``like``."""
    if candidate is None or candidate.is_inference() != torch.is_inference_mode_enabled():
        return None
    same_kind = (candidate.shape, candidate.stride(), candidate.dtype, candidate.device) == (
        like.shape,
        like.stride(),
        like.dtype,
        like.device,
    )
    return candidate if same_kind and candidate.data_ptr() != weight.data_ptr() else None


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
    if ops.takes(grad_output.dtype):
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
