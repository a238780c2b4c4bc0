"""Slow, literal float64 reference of the sparse convolution, to test every fast path against.

Nothing here is shared with the fast implementation: the masks are made group by group with Python's
``sorted``, the convolution is im2col and one matrix product per sample and convolution group, and
the alternating rule multiplies with the explicit matrix T of FST (Xu et al., AAAI 2022), Eq. 10.

Shapes, throughout: ``input`` (N, Cin, H, W), ``weight`` (Cout, Cin/groups, kh, kw), ``grad_output``
(N, Cout, P, Q), columns (N, Cin*kh*kw, P*Q) with the row order (cin, kh, kw), kw fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.rules.alternating import Alternating
from fst.rules.nm import SameAsOutput, Transposable
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from tests.oracle.geometry import Pair, Windows, output_size, reference_im2col
from tests.oracle.rules import (
    alternating_matrices,
    draw,
    exact,
    pruned_operand,
    reference_nm_mask,
    reference_sample,
    reference_top_k_mask,
    reference_transposable_mask,
    transposable_patterns,
)

__all__ = [
    "ReferenceOperands",
    "ReferenceResult",
    "alternating_matrices",
    "output_size",
    "reference_conv2d",
    "reference_im2col",
    "reference_linear",
    "reference_nm_mask",
    "reference_operands",
    "reference_top_k_mask",
    "reference_transposable_mask",
    "transposable_patterns",
]


class ReferenceResult(NamedTuple):
    """The output and the three gradients, float64, on the CPU; grad_bias is None without a bias."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None


class ReferenceOperands(NamedTuple):
    """Both operands of each of the three GEMMs, pruned as the strategy says, float64.

    Each weight is (Cout, Cin/groups, kh, kw), grad_output (N, Cout, P, Q), columns
    (N, Cin*kh*kw, P*Q).
    """

    output_weight: Tensor
    output_columns: Tensor
    grad_input_weight: Tensor
    grad_input_grad_output: Tensor
    grad_weight_grad_output: Tensor
    grad_weight_columns: Tensor


def reference_operands(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceOperands:
    """What `reference_conv2d`, which has the same arguments, multiplies in each GEMM."""
    draws = draws or {}
    inputs, weights, grads = map(exact, (input, weight, grad_output))
    geometry = Windows(inputs.shape[2:], weights.shape[2:], stride, padding, dilation)
    expected = (len(inputs), len(weights), *geometry.output)
    if tuple(grads.shape) != expected:
        raise ValueError(
            f"grad_output must have the output's shape {expected}, got {tuple(grads.shape)}"
        )
    columns = geometry.im2col(inputs)
    forward_weight, backward_weight, backward_grads = weights, weights, grads
    weight_grads, weight_columns = grads, columns

    if strategy.output is not None:
        forward_weight = pruned_operand(strategy.output, "output", weights, draws, groups)
    rule = strategy.grad_input
    if isinstance(rule, SameAsOutput | Transposable):
        backward_weight = forward_weight
    elif rule is not None and rule.operand == "weight":
        source = forward_weight if rule.after_output else weights
        backward_weight = pruned_operand(rule, "grad_input", source, draws, groups)
    elif isinstance(rule, Sampled):
        backward_grads = grads * _sample(rule, grads, draws)[:, None]
    elif rule is not None:
        backward_grads = pruned_operand(rule, "grad_input", grads, draws, groups)
    rule = strategy.grad_weight
    if isinstance(rule, Alternating):
        phase = rule.phase
        if phase == "random":
            phase = int(draw(draws, "phase", "0 or 1, the phase drawn in this step"))
        kept, shift = alternating_matrices(*geometry.output, rule, phase)
        weight_columns = torch.where(kept, columns, 0.0)
        if rule.restore:
            flat = grads.flatten(2)
            weight_grads = (flat + flat @ shift).reshape(grads.shape)
    elif isinstance(rule, Sampled):
        weight_columns = _sampled_columns(inputs, geometry, rule, _sample(rule, grads, draws))
    elif rule is not None and rule.operand == "input":
        weight_columns = pruned_operand(rule, "grad_weight", columns, draws, groups)
    elif rule is not None:
        weight_grads = pruned_operand(rule, "grad_weight", grads, draws, groups)
    return ReferenceOperands(
        forward_weight, columns, backward_weight, backward_grads, weight_grads, weight_columns
    )


def _sample(rule: Sampled, grads: Tensor, draws: Mapping[str, Tensor | int]) -> Tensor:
    """What grad_output is multiplied by at each position (N, P, Q)."""
    start = float(draw(draws, "start", "where the draw of positions starts, in [0, 1)"))
    return reference_sample(grads, rule.keep, start)


def _sampled_columns(inputs: Tensor, geometry: Windows, rule: Sampled, weights: Tensor) -> Tensor:
    """Columns (N, Cin*kh*kw, P*Q) whose product with grad_output is the rule's grad_weight."""
    uneven = [after - before for before, after in geometry.padding]  # counts as image
    inputs, geometry = F.pad(inputs, (0, uneven[1], 0, uneven[0])), geometry.evened()
    mean = inputs[::8].mean((0, 2, 3), keepdim=True) * float(rule.center)
    whole = geometry.im2col(mean.expand(inputs.shape))
    return weights.flatten(1)[:, None] * geometry.im2col(inputs - mean) + whole


def reference_conv2d(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceResult:
    """Output and gradients of a sparse convolution, computed in float64 as the papers write them.

    For each sample and convolution group, with X the im2col columns (FST, Eq. 1 to 3, each with at
    most one operand pruned, as ``strategy`` says)::

        output      Y  = S(W) X
        grad_input  dX = col2im(S(Wᵀ) dY)  or  col2im(Wᵀ S(dY))  or  col2im(S(W)ᵀ dY)
        grad_weight dW = S(dY) Xᵀ  or  dY S(Xᵀ)  or  (dY + dY T) S(Xᵀ),  + λ (W - S(W)) (SR-STE)
        grad_bias   db = Σ dY, never pruned

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw).
        grad_output: (N, Cout, P, Q).
        bias: (Cout,) or None.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``, with "same" and
            "valid".
        strategy: what is pruned in each GEMM; its decay is added if ``decay_mode="gradient"``.
        draws: what a rule cannot compute by itself. By GEMM name: the mask of a random rule or of a
            transposable one other than 2:4 (key "output"), shaped like weight or grad_output, or
            like the columns for input; ``"phase"``: for a rule with ``phase="random"``;
            ``"start"``: where a draw of positions starts, in [0, 1);
            ``"previous"`` (Cout, P, Q) and ``"threshold"``: the step before, for ``Reuse``. A
            mask given for any other N:M rule replaces its own.
    """
    x = reference_operands(
        input,
        weight,
        grad_output,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        strategy=strategy,
        draws=draws,
    )
    geometry = Windows(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    outputs, rows = len(weight) // groups, x.output_columns.shape[1] // groups
    output = torch.zeros(grad_output.shape, dtype=torch.float64)
    grad_columns = torch.zeros_like(x.output_columns)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float64)
    for sample, group in itertools.product(range(len(input)), range(groups)):
        o = slice(group * outputs, (group + 1) * outputs)
        r = slice(group * rows, (group + 1) * rows)
        product = x.output_weight[o].flatten(1) @ x.output_columns[sample, r]
        output[sample, o] = product.reshape(outputs, *geometry.output)
        grads = x.grad_input_grad_output[sample, o].flatten(1)
        grad_columns[sample, r] = x.grad_input_weight[o].flatten(1).T @ grads
        grads = x.grad_weight_grad_output[sample, o].flatten(1)
        product = grads @ x.grad_weight_columns[sample, r].T
        grad_weight[o] += product.reshape(outputs, *weight.shape[1:])
    grad_input = geometry.col2im(grad_columns, input.shape[1])

    if strategy.decay and strategy.decay_mode == "gradient":
        pull = exact(weight) - x.output_weight
        if strategy.output.changes_values:
            pull = torch.where(x.output_weight == 0, exact(weight), 0.0)
        grad_weight = grad_weight + strategy.decay * pull
    grad_bias = None
    if bias is not None:
        output = output + exact(bias).reshape(1, -1, 1, 1)
        grad_bias = exact(grad_output).sum((0, 2, 3))
    return ReferenceResult(output, grad_input, grad_weight, grad_bias)


def reference_linear(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    bias: Tensor | None = None,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceResult:
    """The same for a fully connected layer, as a 1x1 convolution over the positions of each sample.

    ``input`` (*, in), ``weight`` (out, in), ``grad_output`` (*, out). Of (N, in) each sample has
    one position, of (N, T, in) a row of T; in (*, P, Q, in) the axes before P count as samples.
    Masks in ``draws`` are shaped like the convolution's operands: (out, in, 1, 1), (N, out, P, Q)
    and (N, in, P*Q).
    """

    def as_map(tensor: Tensor) -> Tensor:
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(1 if tensor.dim() > 1 else 0)
        return torch.stack([*tensor.flatten(0, -4).unbind(-1)], dim=1)

    result = reference_conv2d(
        as_map(input),
        weight[:, :, None, None],
        as_map(grad_output),
        bias=bias,
        strategy=strategy,
        draws=draws,
    )

    def as_features(tensor: Tensor, features: int) -> Tensor:
        return tensor.movedim(1, -1).reshape(*input.shape[:-1], features)

    return ReferenceResult(
        as_features(result.output, weight.shape[0]),
        as_features(result.grad_input, weight.shape[1]),
        result.grad_weight.reshape(weight.shape),
        result.grad_bias,
    )
