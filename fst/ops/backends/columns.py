"""dW from the input's pruned columns im2col(X), of the rules S(Xᵀ)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fst.backends.registry import Backend, register_backend
from fst.ops.operands import Gradients, PrunedGradWeight
from fst.ops.prune import prune_columns
from fst.rules.masks import samples_in_cache


class Columns(Backend):
    """dW = dY·S(Xᵀ), which needs im2col(X) itself: kh·kw times the memory of the input."""

    name = "columns"
    computes = {"grad_weight": "products of pruned columns im2col(X)"}

    def pruned_grad_weight(
        self, operands: PrunedGradWeight
    ) -> Callable[[PrunedGradWeight], Gradients]:
        return _multiply


def _multiply(operands: PrunedGradWeight) -> Gradients:
    """On a CPU some samples at a time, unless masks are drawn for all of them at once."""
    grad_output, input, rule = operands.grad_output, operands.input, operands.rule
    stride, padding, dilation, groups = operands.geometry
    kernel = (operands.weight.shape[2], operands.weight.shape[3])
    channels, taps = grad_output.shape[1], input.shape[1] // groups * math.prod(kernel)
    size = len(input)
    if not rule.is_random:
        size = samples_in_cache(input, groups * taps * math.prod(grad_output.shape[2:]))
    wide = torch.promote_types(input.dtype, torch.float32)
    product = input.new_zeros((groups, channels // groups, taps), dtype=wide)
    for part, rows in zip(input.split(size), grad_output.split(size), strict=True):
        unfolded = F.unfold(part, kernel, dilation, padding, stride)
        columns = prune_columns(unfolded, rule, operands.generator, operands.record)
        columns = columns.unflatten(1, (groups, taps))
        rows = rows.flatten(2).unflatten(1, (groups, channels // groups))
        if len(part) < len(input):  # few samples: a product each costs no copy of the columns
            product += torch.matmul(rows, columns.transpose(2, 3)).sum(0)
        else:
            product += torch.einsum("ngol,ngkl->gok", rows, columns)
    found = product.to(input.dtype).reshape(channels, input.shape[1] // groups, *kernel)
    return None, found, None


register_backend(Columns())
