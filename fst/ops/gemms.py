"""The two GEMMs of a backward pass, each by the backend that is chosen for it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import ONLY_WEIGHT, Geometry, gradients, input_gradient
from fst.ops.positions import fixed, sampled
from fst.ops.positions.sampled import Lists, Step
from fst.ops.prune import prune_columns
from fst.rules.masks import samples_in_cache
from fst.rules.rule import Rule


def grad_input(grad_output: Tensor, step: Step, rule: Rule | None, lists: Lists | None) -> Tensor:
    """dX (N, Cin, H, W) of dY and S(Wᵀ).

    Args:
        grad_output: as this GEMM multiplies with it, (N, Cout, P, Q).
        lists: those of grad_weight, if it has drawn positions.
    """
    weight, geometry, input_shape = step.weight, step.geometry, step.input_shape
    if rule is not None and rule.samples and step.positions:
        return sampled.grad_input(step, rule, lists)
    if step.input is None:
        return input_gradient(grad_output, weight, geometry, input_shape)
    # where the input was saved for grad_weight anyway, fewer operators are called with it
    operands = (grad_output, step.input, weight, geometry)
    return gradients(*operands, (True, False, False))[0]


def grad_weight(
    grad_output: Tensor,
    step: Step,
    rule: Rule | None,
    phase: int,
    generator: torch.Generator | None,
) -> tuple[Tensor | None, Tensor, Lists | None]:
    """dX if it was computed with dW, dW (Cout, Cin/groups, kh, kw) of dY and X, and the lists of
    positions that dW was computed from.

    Args:
        grad_output: as this GEMM multiplies with it, (N, Cout, P, Q).
        phase: which positions a rule of the input keeps.
    """
    input, weight, geometry = step.input, step.weight, step.geometry
    if rule is not None and rule.samples and step.positions:
        return sampled.grad_weight(step, rule)
    if rule is not None and rule.operand == "input":
        size = (grad_output.shape[2], grad_output.shape[3])
        if rule.kept_positions(*size, phase) is not None:
            found = fixed.grad_weight(grad_output, input, weight, geometry, rule, phase)
            return None, found, None
        kernel = (weight.shape[2], weight.shape[3])
        found = _of_pruned_columns(grad_output, input, kernel, geometry, rule, generator)
        return None, found, None
    return *gradients(grad_output, input, weight, geometry, ONLY_WEIGHT)[:2], None


def _of_pruned_columns(
    grad_output: Tensor,
    input: Tensor,
    kernel: tuple[int, int],
    geometry: Geometry,
    rule: Rule,
    generator: torch.Generator | None,
) -> Tensor:
    """dW = dY · S(Xᵀ), which needs im2col(X) itself: kh·kw times the memory of the input.

    On a CPU only of some samples at a time, unless masks are drawn for all of them at once.
    """
    stride, padding, dilation, groups = geometry
    channels, taps = grad_output.shape[1], input.shape[1] // groups * math.prod(kernel)
    size = len(input)
    if not rule.is_random:
        size = samples_in_cache(input, groups * taps * math.prod(grad_output.shape[2:]))
    wide = torch.promote_types(input.dtype, torch.float32)
    product = input.new_zeros((groups, channels // groups, taps), dtype=wide)
    for part, rows in zip(input.split(size), grad_output.split(size), strict=True):
        columns = prune_columns(F.unfold(part, kernel, dilation, padding, stride), rule, generator)
        columns = columns.unflatten(1, (groups, taps))
        rows = rows.flatten(2).unflatten(1, (groups, channels // groups))
        if len(part) < len(input):  # few samples: a product each costs no copy of the columns
            product += torch.matmul(rows, columns.transpose(2, 3)).sum(0)
        else:
            product += torch.einsum("ngol,ngkl->gok", rows, columns)
    return product.to(input.dtype).reshape(channels, input.shape[1] // groups, *kernel)
