"""The three GEMMs on pruned operands: by the library, with 2:4 weights, or over kept positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch, registry
from fst.ops import positions, sparse24
from fst.ops.geometry import Geometry, convolve, gradients, input_gradient, output_shape
from fst.ops.kept import KeptPositions
from fst.ops.prune import prune_columns
from fst.ops.sparse24 import PackedWeight
from fst.rules.masks import samples_in_cache
from fst.rules.nm import NM
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy

TWO_OF_FOUR = NM("weight", 2, 4)
Candidates = dict[str, Callable[[], Tensor]]


def wants_packing(strategy: Strategy, dtype: torch.dtype) -> bool:
    """Whether a packed weight may be of use: a rule is 2:4, and a backend for it can run here."""
    return dtype in sparse24.DTYPES and any(
        strategy.rule(gemm) == TWO_OF_FOUR and len(registry.possible(gemm)) > 1
        for gemm in ("output", "grad_input")
    )


def pack(
    weight: Tensor, groups: int, strategy: Strategy, dtype: torch.dtype
) -> PackedWeight | None:
    """The dense weight (Cout, Cin/groups, kh, kw), packed; None where nobody wants it."""
    if not wants_packing(strategy, dtype):
        return None
    return sparse24.pack([weight.detach()], [groups], dtype)[0]


def for_grad_input(strategy: Strategy, packed: Sequence[Tensor]) -> Sequence[Tensor]:
    """What `grad_input` needs of a `PackedWeight`; nothing where it multiplies with another S."""
    return packed[2:] if strategy.grad_input == TWO_OF_FOUR else ()


def output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    strategy: Strategy,
    packed: Sequence[Tensor],
) -> Tensor:
    """(N, Cin, H, W) and S(W) -> (N, Cout, P, Q).

    ``packed`` is the same S(W) for the sparse kernels, as a `PackedWeight`, or empty.
    """
    dense = functools.partial(convolve, input, weight, bias, geometry)
    if not packed or strategy.output != TWO_OF_FOUR:
        return dense()
    candidates: Candidates = {"torch": dense}
    kernel, size = weight.shape[2:], output_shape(input.shape, weight.shape, geometry)
    if _can_be_sparse("output", is_readable(input), input.shape, size, kernel, geometry):
        candidates[sparse24.BACKEND] = functools.partial(
            sparse24.convolve, input, packed[:2], bias, size, kernel, geometry
        )
    options = (*geometry, bias is not None)
    return dispatch.run("output", candidates, (input, weight), options)


def grad_input(
    grad_output: Tensor,
    weight: Tensor,
    geometry: Geometry,
    input_shape: torch.Size,
    packed: Sequence[Tensor],
    input_fits: bool,
    input: Tensor | None = None,
) -> Tensor:
    """(N, Cout, P, Q) and S(Wᵀ) -> (N, Cin, H, W); ``packed`` is what `for_grad_input` gives.

    ``input``: where it was saved for grad_weight anyway, fewer operators are called with it.
    """

    def dense() -> Tensor:
        if input is None:
            return input_gradient(grad_output, weight, geometry, input_shape)
        return gradients(grad_output, input, weight, geometry, (True, False, False))[0]

    if not packed:
        return dense()
    candidates: Candidates = {"torch": dense}
    kernel, size = weight.shape[2:], grad_output.shape
    if _can_be_sparse("grad_input", input_fits, input_shape, size, kernel, geometry):
        candidates[sparse24.BACKEND] = functools.partial(
            sparse24.input_gradient, grad_output, packed, input_shape, kernel, geometry
        )
    options = (*geometry, *input_shape[2:])
    return dispatch.run("grad_input", candidates, (grad_output, weight), options)


def grad_weight(
    grad_output: Tensor,
    inputs: list[Tensor],
    weight: Tensor,
    geometry: Geometry,
    rule: Rule | None,
    kept: KeptPositions | None,
    generator: torch.Generator | None,
    *,
    with_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """(N, Cout, P, Q) and the saved inputs -> dW (Cout, Cin/groups, kh, kw), and the bias's
    gradient where that comes with it (``with_bias``: only from a grad_output that is not pruned).

    ``rule`` has pruned grad_output already, if that is its operand.
    """
    if kept is not None:
        return positions.grad_weight(grad_output, inputs, weight, kept), None
    if rule is not None and rule.operand == "input":
        kernel = (weight.shape[2], weight.shape[3])
        return _of_pruned_columns(grad_output, inputs[0], kernel, geometry, rule, generator), None
    needed = (False, True, with_bias)
    return gradients(grad_output, inputs[0], weight, geometry, needed)[1:]


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


def is_readable(input: Tensor) -> bool:
    """Whether the sparse kernels can read it without a copy from another memory format."""
    channels_last = input.is_contiguous(memory_format=torch.channels_last)
    return channels_last or not input.is_contiguous()


def _can_be_sparse(
    gemm: str,
    input_fits: bool,
    input_shape: Sequence[int],
    output_size: Sequence[int],
    kernel: Sequence[int],
    geometry: Geometry,
) -> bool:
    if not input_fits or not input_shape[0] or sparse24.BACKEND not in registry.possible(gemm):
        return False
    return not sparse24.unsupported(input_shape, output_size, kernel, geometry)
