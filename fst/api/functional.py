"""The op as functions: `sparse_conv2d` and `sparse_linear`, by a strategy or its name."""

from __future__ import annotations

import torch
from torch import Tensor

from fst.backends.record import Record
from fst.ops.arguments import IntPair, check_tensors, compute_dtype, padded_geometry
from fst.ops.conv import convolve_pruned, images_of_rows, rows_of_images
from fst.ops.geometry import LINEAR, Geometry
from fst.ops.plan import CallPlan, draws_of
from fst.rules.strategy import Strategy
from fst.strategies.registry import default_strategy


def sparse_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntPair = 1,
    padding: IntPair | str = 0,
    dilation: IntPair = 1,
    groups: int = 1,
    strategy: str | Strategy = "fst",
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`F.conv2d` whose three GEMMs ``strategy`` prunes.

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw), dense. Its gradient is that of the dense weight
            (straight through), plus λ(W − S(W)) where the strategy decays through the gradient.
        bias: (Cout,) or None.
        stride, padding, dilation, groups: as in `F.conv2d`, "same" and "valid" included.
        strategy: a name or a `Strategy`. `resprop` remembers earlier steps in layers only.
            Here every call is its first step, which is dense.
        generator: source of randomness of random rules; torch's default generator if None.

    Returns:
        (N, Cout, P, Q), differentiable once; twice where the strategy prunes weights alone.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and what is allowed.
    """
    groups = check_tensors(input, weight, bias, groups)
    input, geometry = padded_geometry(input, weight, stride, padding, dilation, groups)
    return _convolve(input, weight, bias, geometry, strategy, generator)


def sparse_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strategy: str | Strategy = "fst",
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`F.linear` whose three GEMMs ``strategy`` prunes: a 1x1 convolution over the positions.

    Args:
        input: (..., in_features). Rules of grad_weight group, pair or draw positions: the tokens
            of (N, T, C), or the map of (..., H, W, C). (N, C) has one position for each sample.
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        strategy, generator: as in `sparse_conv2d`.

    Returns:
        (..., out_features), differentiable as `sparse_conv2d` is.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and what is allowed.
    """

    images, kernel = images_of_rows(input, weight), weight[:, :, None, None]
    check_tensors(images, kernel, bias, 1)
    output = _convolve(images, kernel, bias, LINEAR, strategy, generator)
    return rows_of_images(output, input)


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    strategy: str | Strategy,
    generator: torch.Generator | None,
) -> Tensor:
    """`sparse_conv2d` of tensors that are checked, and padded as far as ``geometry`` needs it."""
    if not isinstance(strategy, Strategy):
        strategy = default_strategy(strategy)
    dtype = compute_dtype(input, weight, bias)
    plan = CallPlan(strategy, geometry, dtype, Record(), trains=True)
    pruned = plan.prune(weight.detach(), generator)
    draws = draws_of(strategy, input, generator)
    return convolve_pruned(input, weight, bias, plan, pruned, draws, strategy.gradient_decay)
